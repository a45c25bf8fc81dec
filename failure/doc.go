// Package failure is how a handler says what should happen to its message, and
// how errors are told apart.
//
// A handler returns an error. A plain one counts as an attempt and the message
// is tried again. The functions of this package make errors that say more:
// [Permanent], [Skip], [RetryAfter], [Snooze], [Unavailable], and [At] for one
// message of a batch. Wrapping is kept: errors.Is and errors.As see the cause.
//
// The package imports nothing of kafkaonce. All functions may be called from
// any goroutine.
package failure
