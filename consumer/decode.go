package consumer

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/kafkaonce/kafkaonce/failure"
)

// Decoder makes a T of a message. An error is poison with code undecodable,
// unless it is a verdict of package failure (failure.Skip for tombstones, for
// example, or failure.Unavailable for a schema registry that is down).
type Decoder[T any] func(*Message) (T, error)

// Item is a decoded message of a batch.
type Item[T any] struct {
	*Message
	Body T
}

// messageDecoder is how the engine asks a typed handler, before the batch
// begins, whether it can read a message. The decoded value is handed back in
// the context of the call, so that a message is decoded once per run.
type messageDecoder interface {
	decodeMessage(*Message) (any, error)
}

type decodedKey struct{}

// withDecoded hands decoded values to a typed handler.
func withDecoded(ctx context.Context, v any) context.Context {
	return context.WithValue(ctx, decodedKey{}, v)
}

// decodedValue is one message's decoded body with the message it came from.
type decodedValue struct {
	message *Message
	body    any
}

type typedHandler[T any] struct {
	decode Decoder[T]
	handle func(context.Context, Tx, *Message, T) error
}

func (h typedHandler[T]) decodeMessage(m *Message) (any, error) { return h.decode(m) }

func (h typedHandler[T]) Handle(ctx context.Context, tx Tx, m *Message) error {
	if v, ok := ctx.Value(decodedKey{}).(decodedValue); ok && v.message == m {
		if body, ok := v.body.(T); ok {
			return h.handle(ctx, tx, m, body)
		}
	}
	body, err := h.decode(m)
	if err != nil {
		return undecodable(err)
	}
	return h.handle(ctx, tx, m, body)
}

// Decode makes a [Handler] of a function that takes a decoded body. A record
// that decode refuses becomes a letter before the handler sees its batch.
func Decode[T any](decode Decoder[T], handle func(context.Context, Tx, *Message, T) error) Handler {
	return typedHandler[T]{decode, handle}
}

// JSON is [Decode] with encoding/json. A tombstone (nil value) is undecodable;
// a handler that expects tombstones uses Decode.
func JSON[T any](handle func(context.Context, Tx, *Message, T) error) Handler {
	return Decode(decodeJSON[T], handle)
}

type typedBatch[T any] struct {
	decode Decoder[T]
	handle func(context.Context, Tx, []Item[T]) error
}

func (h typedBatch[T]) decodeMessage(m *Message) (any, error) { return h.decode(m) }

func (h typedBatch[T]) HandleBatch(ctx context.Context, tx Tx, ms []*Message) error {
	items := make([]Item[T], len(ms))
	decoded, _ := ctx.Value(decodedKey{}).([]decodedValue)
	for i, m := range ms {
		if i < len(decoded) && decoded[i].message == m {
			if body, ok := decoded[i].body.(T); ok {
				items[i] = Item[T]{m, body}
				continue
			}
		}
		body, err := h.decode(m)
		if err != nil {
			return failure.At(i, undecodable(err))
		}
		items[i] = Item[T]{m, body}
	}
	return h.handle(ctx, tx, items)
}

// DecodeBatch makes a [BatchHandler] of a function that takes decoded bodies.
func DecodeBatch[T any](decode Decoder[T], handle func(context.Context, Tx, []Item[T]) error) BatchHandler {
	return typedBatch[T]{decode, handle}
}

// JSONBatch is [DecodeBatch] with encoding/json.
func JSONBatch[T any](handle func(context.Context, Tx, []Item[T]) error) BatchHandler {
	return DecodeBatch(decodeJSON[T], handle)
}

func decodeJSON[T any](m *Message) (T, error) {
	var body T
	if m.Value == nil {
		return body, fmt.Errorf("a tombstone (nil value) is not JSON")
	}
	err := json.Unmarshal(m.Value, &body)
	return body, err
}

// undecodable turns a decoder's error into the verdict that the engine acts on.
func undecodable(err error) error {
	if failure.VerdictOf(err).Kind != failure.VerdictRetry {
		return err
	}
	return failure.Permanent(failure.CodeUndecodable, err)
}
