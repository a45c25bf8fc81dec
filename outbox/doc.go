// Package outbox sends records to Kafka if and only if the transaction that
// asked for them commits.
//
// [Enqueue] writes a row in the caller's transaction; a [Relay] produces it and
// deletes the row when the broker has acknowledged it.
//
// # Guarantees
//
//   - A row of a committed transaction is sent at least once; one of a
//     transaction that rolled back, never.
//   - Each record carries [HeaderID], the same on every sending. Inside a
//     handler the id is derived from the message, so a message that is
//     processed again after Postgres was restored sends the same id.
//   - In order per topic and record key, among first appearances. A copy that
//     is sent again after a crash may stand behind newer records; its id was
//     seen before. Records with a nil key have no order.
//   - A record that can't be sent blocks its own topic and key, loudly, and
//     nothing else. It is never dropped.
package outbox
