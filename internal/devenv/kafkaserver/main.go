// Command kafkaserver runs a real Kafka on 127.0.0.1:9092 until it is told to
// stop. It needs Java 17, and the first time Maven.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/kafkaonce/kafkaonce/internal/devenv"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	say := func(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }
	k, err := devenv.StartKafka(ctx, devenv.KafkaOptions{Port: 9092, Log: say})
	if err != nil {
		say("%v", err)
		os.Exit(1)
	}
	say("Kafka %s listens on %s; Ctrl-C ends it and removes its data", devenv.KafkaVersion, k.Brokers[0])
	<-ctx.Done()
	if err := k.Close(); err != nil {
		say("%v", err)
		os.Exit(1)
	}
}
