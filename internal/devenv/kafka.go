package devenv

import (
	"context"
	"crypto/rand"
	_ "embed"
	"encoding/base64"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

//go:embed kafka/pom.xml
var kafkaPom []byte

// KafkaVersion is the version of the broker that StartKafka runs.
const KafkaVersion = "4.4.0"

// KafkaOptions say which broker is wanted. The zero value is the default.
type KafkaOptions struct {
	Port     int                              // 0 takes a free one
	Settings map[string]string                // for server.properties
	Log      func(format string, args ...any) // progress in words; nil is silent
}

// Kafka is a real broker of our own, one node that is also its controller.
type Kafka struct {
	Brokers []string

	root, jars string
	server     *supervised
}

// StartKafka starts a broker on 127.0.0.1. It needs Java 17 and, the first
// time, Maven, which fetches the jars into the cache.
func StartKafka(ctx context.Context, o KafkaOptions) (*Kafka, error) {
	say := o.Log
	if say == nil {
		say = func(string, ...any) {}
	}
	if _, err := exec.LookPath("java"); err != nil {
		return nil, fmt.Errorf("a real Kafka needs Java 17: install it (Debian: apt-get install openjdk-17-jre-headless maven): %w", err)
	}
	jars, err := kafkaJars(ctx, say)
	if err != nil {
		return nil, err
	}
	k := &Kafka{jars: jars}
	if k.root, err = os.MkdirTemp("", "kafkaonce-kafka-"); err != nil {
		return nil, err
	}
	if err := k.configure(ctx, o); err != nil {
		_ = os.RemoveAll(k.root)
		return nil, err
	}
	if err := k.start(ctx); err != nil {
		_ = k.Close()
		return nil, err
	}
	return k, nil
}

// kafkaJars fetches the jars once. They are complete when their folder has its
// final name.
func kafkaJars(ctx context.Context, say func(string, ...any)) (string, error) {
	cache, err := cacheDir()
	if err != nil {
		return "", err
	}
	final := filepath.Join(cache, "kafka-"+KafkaVersion)
	if _, err := os.Stat(final); err == nil {
		return final, nil
	}
	if _, err := exec.LookPath("mvn"); err != nil {
		return "", fmt.Errorf("the jars of Kafka are not there yet and Maven is missing: install it (Debian: apt-get install maven): %w", err)
	}
	say("fetching the jars of Kafka %s (once)", KafkaVersion)
	tmp, err := os.MkdirTemp(cache, "kafka-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	pom := filepath.Join(tmp, "pom.xml")
	if err := os.WriteFile(pom, kafkaPom, 0o600); err != nil {
		return "", err
	}
	out := filepath.Join(tmp, "jars")
	cmd := exec.CommandContext(ctx, "mvn", "-q", "-B", "-f", pom, "dependency:copy-dependencies", "-DoutputDirectory="+out) //nolint:gosec // our own arguments
	if text, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("mvn could not fetch Kafka: %w: %s", err, tail(text, 2000))
	}
	if err := os.Rename(out, final); err != nil {
		if _, e := os.Stat(final); e != nil { // another process was not faster either
			return "", err
		}
	}
	return final, nil
}

func (k *Kafka) configure(ctx context.Context, o KafkaOptions) (err error) {
	port := o.Port
	if port == 0 {
		if port, err = freePort(); err != nil {
			return err
		}
	}
	controller, err := freePort()
	if err != nil {
		return err
	}
	k.Brokers = []string{fmt.Sprintf("127.0.0.1:%d", port)}
	settings := map[string]string{
		"process.roles": "broker,controller", "node.id": "1",
		"listeners":                                        fmt.Sprintf("PLAINTEXT://127.0.0.1:%d,CONTROLLER://127.0.0.1:%d", port, controller),
		"advertised.listeners":                             fmt.Sprintf("PLAINTEXT://127.0.0.1:%d", port),
		"controller.listener.names":                        "CONTROLLER",
		"controller.quorum.bootstrap.servers":              fmt.Sprintf("127.0.0.1:%d", controller),
		"log.dirs":                                         filepath.Join(k.root, "data"),
		"num.partitions":                                   "1",
		"auto.create.topics.enable":                        "false",
		"offsets.topic.num.partitions":                     "4",
		"transaction.state.log.num.partitions":             "4",
		"offsets.topic.replication.factor":                 "1",
		"transaction.state.log.replication.factor":         "1",
		"transaction.state.log.min.isr":                    "1",
		"share.coordinator.state.topic.replication.factor": "1",
		"share.coordinator.state.topic.min.isr":            "1",
		"group.initial.rebalance.delay.ms":                 "0",
		"group.min.session.timeout.ms":                     "1000",
		"group.consumer.min.session.timeout.ms":            "1000",
		"group.consumer.session.timeout.ms":                "3000",
		"group.consumer.min.heartbeat.interval.ms":         "200",
		"group.consumer.heartbeat.interval.ms":             "500",
		"log.cleaner.backoff.ms":                           "200",
		"log.retention.check.interval.ms":                  "500",
		"log.initial.task.delay.ms":                        "100",
	}
	for name, value := range o.Settings {
		settings[name] = value
	}
	var b strings.Builder
	for name, value := range settings {
		fmt.Fprintf(&b, "%s=%s\n", name, value)
	}
	if err := os.WriteFile(k.properties(), []byte(b.String()), 0o600); err != nil {
		return err
	}
	id := make([]byte, 16)
	_, _ = rand.Read(id) // never fails (crypto/rand)
	out, err := k.Tool(ctx, "kafka.tools.StorageTool", "format", "--standalone", "-t", base64.RawURLEncoding.EncodeToString(id), "-c", k.properties())
	if err != nil {
		return fmt.Errorf("format Kafka's storage: %w: %s", err, tail(out, 2000))
	}
	return nil
}

func (k *Kafka) properties() string { return filepath.Join(k.root, "server.properties") }

func (k *Kafka) java(class string, args ...string) []string {
	return slices.Concat([]string{"java", "-Xmx768m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
		"-cp", filepath.Join(k.jars, "*"), class}, args)
}

// Tool runs one of Kafka's own command line tools by its class name.
func (k *Kafka) Tool(ctx context.Context, class string, args ...string) ([]byte, error) {
	argv := k.java(class, args...)
	return exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput() //nolint:gosec // our own arguments
}

func (k *Kafka) start(ctx context.Context) (err error) {
	log := filepath.Join(k.root, "server.log")
	if k.server, err = supervise(k.root, log, "KILL", nil, nil, k.java("kafka.Kafka", k.properties())...); err != nil {
		return err
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(k.Brokers...))
	if err != nil {
		return err
	}
	defer client.Close()
	limit, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		try, done := context.WithTimeout(limit, 2*time.Second)
		err := client.Ping(try)
		done()
		if err == nil {
			return nil
		}
		if limit.Err() != nil || k.server.gone() {
			text, _ := os.ReadFile(log)
			return fmt.Errorf("Kafka did not start: %w: %s", err, tail(text, 2000))
		}
		time.Sleep(100 * time.Millisecond) // between two questions
	}
}

// Stop ends the broker and keeps its data: TERM in good order, KILL as in a crash.
func (k *Kafka) Stop(signal string) error { return k.server.stop(signal) }

// Restart starts a stopped broker on the same port and data.
func (k *Kafka) Restart(ctx context.Context) error { return k.start(ctx) }

// Close ends the broker and removes its data. It may be called twice.
func (k *Kafka) Close() error {
	var err error
	if k.server != nil {
		err = k.server.remove()
	}
	if e := os.RemoveAll(k.root); err == nil {
		err = e
	}
	return err
}
