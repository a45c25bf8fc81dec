package consumer

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Tx is the transaction that a handler writes its effect through. It is valid
// until the handler returns, and for one goroutine at a time.
//
// Queue defers a statement: queued statements of a whole batch go to the
// server in one round trip, in order, before any direct query and before
// COMMIT. A callback set on the result may refuse (an UPDATE that found no
// row); its error belongs to the message that queued the statement.
//
// Commit and Rollback never reach the server: they return an error, and the
// message fails even when the handler swallows it. Begin opens a savepoint.
// Statements that end or begin a transaction are refused.
//
// The messages of a batch share one transaction: now(), SET LOCAL and locks
// reach from one message to the next. A handler that uses SET LOCAL (row-level
// security) sets Config.MaxBatch to 1.
type Tx interface {
	pgx.Tx
	Queue(sql string, args ...any) *pgx.QueuedQuery
}

// Handler writes the effect of one message. A nil error means done. An error
// undoes what this message wrote and is judged as package failure says: a
// plain one counts as an attempt and is tried again later. A handler must
// return soon after ctx ends, and may run again because another message of its
// batch failed.
type Handler interface {
	Handle(ctx context.Context, tx Tx, m *Message) error
}

// HandlerFunc makes a function a [Handler].
type HandlerFunc func(ctx context.Context, tx Tx, m *Message) error

// Handle calls f.
func (f HandlerFunc) Handle(ctx context.Context, tx Tx, m *Message) error { return f(ctx, tx, m) }

// BatchHandler writes the effects of several messages at once, set-based. A
// nil error means all are done. failure.At names the one that failed; without
// it the engine finds it by running halves.
type BatchHandler interface {
	HandleBatch(ctx context.Context, tx Tx, ms []*Message) error
}

// BatchFunc makes a function a [BatchHandler].
type BatchFunc func(ctx context.Context, tx Tx, ms []*Message) error

// HandleBatch calls f.
func (f BatchFunc) HandleBatch(ctx context.Context, tx Tx, ms []*Message) error {
	return f(ctx, tx, ms)
}

// Chain wraps h in middleware; the first one is the outermost. A middleware is
// any func(Handler) Handler. It runs inside the transaction of the message. It
// may look into what [JSON] and [Decode] return only through Handle.
func Chain(h Handler, middleware ...func(Handler) Handler) Handler {
	decoder, _ := h.(messageDecoder)
	for i := len(middleware) - 1; i >= 0; i-- {
		h = middleware[i](h)
	}
	if decoder != nil {
		return decodedChain{Handler: h, messageDecoder: decoder}
	}
	return h
}

// decodedChain keeps the decoder of the innermost handler visible to the
// engine, so that undecodable records are found before the batch runs.
type decodedChain struct {
	Handler
	messageDecoder
}
