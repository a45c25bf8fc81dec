// Package dlq holds the letters: messages that could not take effect, with
// everything that is needed to try again.
//
// A letter is a row in Postgres, written in one transaction with the outbox
// row that brings a copy to the DLQ topic. The row is the truth; the topic is
// for everyone else. A letter's id is the digest of group, topic id, partition,
// leader epoch and offset, so one record becomes at most one letter.
//
// envelope.go says what a record of a DLQ topic looks like, topicname.go how
// the topic is called, letter.go what the engine writes.
package dlq
