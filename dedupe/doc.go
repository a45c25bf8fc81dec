// Package dedupe holds what makes a message take effect once: the claim (the
// dedupe row of a message, committed together with its effect), the position
// of a partition and its fence (only one owner writes), and the retention of
// claims.
//
// # Guarantees
//
//   - Two transactions that claim one digest never both commit: the second
//     waits for the first and inherits its outcome (PostgreSQL, "INSERT",
//     ON CONFLICT; seen in READ COMMITTED, which every statement here wants).
//   - A transaction that passed the fence commits before the next owner reads
//     the position, or not at all.
//
// It is used by package consumer; a program needs it only for [Digest] and
// [Fingerprint] when it looks for a claim by hand.
package dedupe
