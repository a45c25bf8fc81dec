// Command example-consumer shows kafkaonce at work: it publishes payments with
// everything that goes wrong in real topics, processes them with members that
// come, go, freeze and are killed, and checks that each took effect once.
//
// With no flags it brings its own Kafka (in process) and PostgreSQL.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/alecthomas/kong"
)

// flags are the command's options.
type flags struct {
	Brokers     []string `help:"Kafka to use instead of the in-process one (host:port, comma separated)."`
	DatabaseURL string   `name:"database-url" env:"EXAMPLE_DATABASE_URL" help:"PostgreSQL to use instead of one of our own."`
	Messages    int      `default:"20000" help:"Payments to publish (500 to 5,000,000)."`
	Members     int      `default:"3" help:"Members of the consumer group (2 to 16)."`
	Partitions  int32    `default:"6" help:"Partitions of the topic (2 to 64)."`
	Input       string   `type:"existingfile" help:"Publish these lines instead (NDJSON, each an object with an id); anything else becomes a letter."`
	Serve       bool     `help:"Only run one member on the topic until SIGTERM."`
	Topic       string   `help:"The topic. Defaults to a new one per run; with --serve to payments."`
	JSON        bool     `name:"json" help:"Print one JSON object instead of a table."`

	// The parent starts itself with these to run a member.
	Member  string `hidden:""`
	Journal string `hidden:""`
	Group   string `hidden:"" default:"billing"`
	Schema  string `hidden:"" default:"kafkaonce"`
	Session string `hidden:"" default:"6s"`
}

// errVerdict ends a run whose verdict was printed already.
var errVerdict = errors.New("not exactly once")

func main() {
	var f flags
	kong.Parse(&f, kong.Name("example-consumer"), kong.Description("Watch payments take effect exactly once through rebalances, process kills and poison."))
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	switch {
	case f.Member != "":
		err = runMember(ctx, f)
	case f.Serve:
		err = serve(ctx, f)
	default:
		err = runDemo(ctx, f)
	}
	if err != nil {
		if !errors.Is(err, errVerdict) {
			fmt.Fprintln(os.Stderr, "example-consumer:", err)
		}
		os.Exit(1)
	}
}

func (f *flags) check() error {
	switch {
	case f.Messages < 500 || f.Messages > 5_000_000:
		return fmt.Errorf("--messages is %d: choose 500 to 5,000,000", f.Messages)
	case f.Members < 2 || f.Members > 16:
		return fmt.Errorf("--members is %d: choose 2 to 16, a single one can't be replaced", f.Members)
	case f.Partitions < 2 || f.Partitions > 64:
		return fmt.Errorf("--partitions is %d: choose 2 to 64", f.Partitions)
	}
	return nil
}
