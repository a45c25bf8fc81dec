# Everything a developer runs. `make help` lists it.
SHELL := /bin/bash

.PHONY: help demo test unit lint vuln mutants bench bench-kafka soak kafka clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: ## watch payments take effect exactly once (needs nothing but Go)
	go run ./cmd/example-consumer

test: ## run all tests; names at the end what this machine lacks
	@integration/run all

unit: ## run the tests that need nothing but Go and PostgreSQL
	@integration/run unit

lint: ## gofmt, go vet, and golangci-lint where it is installed
	@test -z "$$(gofmt -l .)" || { gofmt -l .; echo "run gofmt -w on these"; exit 1; }
	go vet ./...
	@if command -v golangci-lint >/dev/null; then golangci-lint run; fi

vuln: ## look for known vulnerabilities
	go run golang.org/x/vuln/cmd/govulncheck@v1.1.4 ./...

mutants: ## prove that the tests can fail: each patch must turn its test red
	@integration/mutants/run

bench: ## measure against hand-written loops, in process Kafka (15 to 30 minutes)
	go run ./bench --write bench/README.md

bench-kafka: ## the same rows that matter on a real Kafka
	go run ./bench --kafka real --slow 20000 --write bench/README.md \
		--only loop,loop_per_partition,batch_loop,queue,batch_loop_no_dedupe,fight_loop,fight,hot_loop,hot

soak: ## what is too long for every change: long outages, many kills, fuzzing
	@integration/run soak

kafka: ## start a real Kafka on 127.0.0.1:9092 from Maven jars, until Ctrl-C
	go run ./internal/devenv/kafkaserver

clean: ## remove what builds and tests leave behind
	rm -rf bin tmp
