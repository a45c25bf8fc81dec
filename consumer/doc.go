// Package consumer turns messages of Kafka topics into effects in PostgreSQL,
// exactly one per message.
//
// # What is guaranteed
//
// Everything a handler writes through the [Tx] it is given commits in one
// transaction together with the claim of its message, the dedupe row found by
// the message's idempotency key. So for each key there is one complete effect:
// after a redelivery, after a crash at any point, after a COMMIT whose reply
// was lost, and while a member that lost its partition is still running. A
// message whose handler keeps failing becomes one letter, in Postgres and in
// the DLQ topic. An offset is committed to Kafka only after everything
// delivered below it has become an effect, a duplicate, or a letter.
//
// # What is not
//
// Nothing is promised for what a handler does outside its Tx: HTTP calls, mail,
// writes through another connection. It may run more than once for one effect.
// A raw COMMIT sent through the Tx's connection, synchronous_commit=off
// (refused at start) and a second database are outside too.
//
// # Where to start reading
//
// consumer.go starts and ends everything, poll.go is the loop that talks to
// Kafka, lane.go orders the messages of one partition, batch.go puts them
// through one transaction. DESIGN.md has the map.
package consumer
