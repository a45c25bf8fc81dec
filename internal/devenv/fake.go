package devenv

import (
	"github.com/twmb/franz-go/pkg/kfake"
)

// FakeKafka is a Kafka inside this process, on real TCP ports of 127.0.0.1.
type FakeKafka struct {
	Brokers []string
	Cluster *kfake.Cluster
}

// StartFakeKafka starts brokers in this process.
func StartFakeKafka(opts ...kfake.Opt) (*FakeKafka, error) {
	cluster, err := kfake.NewCluster(append([]kfake.Opt{kfake.NumBrokers(1)}, opts...)...)
	if err != nil {
		return nil, err
	}
	return &FakeKafka{Brokers: cluster.ListenAddrs(), Cluster: cluster}, nil
}

// Close ends the brokers.
func (k *FakeKafka) Close() { k.Cluster.Close() }
