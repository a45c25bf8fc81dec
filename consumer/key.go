package consumer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// KeyFunc finds the idempotency key of a message: what makes two messages the
// same one. It names the message (an event id), not the entity that it is
// about: with an order number as key, the second event of an order would be
// taken for a repetition of the first. An error or "" makes the message a
// letter with code key_missing. A KeyFunc must be a function of the message
// alone: with a clock or a random number in it nothing is suppressed.
type KeyFunc func(*Message) (string, error)

// KeyHeader takes the key from the last header called name, byte for byte.
func KeyHeader(name string) KeyFunc {
	return func(m *Message) (string, error) {
		v, ok := m.Header(name)
		if !ok || len(v) == 0 {
			return "", fmt.Errorf("no header %q", name)
		}
		return string(v), nil
	}
}

// KeyRecordKey takes the record key. It fits topics in which each record has a
// key of its own; where the record key is an entity id it does not.
func KeyRecordKey() KeyFunc {
	return func(m *Message) (string, error) {
		if len(m.RecordKey) == 0 {
			return "", errors.New("the record has no key")
		}
		return string(m.RecordKey), nil
	}
}

// KeyJSON takes the key from a field of a JSON object in the value. path is a
// list of field names separated by dots, as in "event.id". The field must be a
// string or a number; a number counts as its literal text, so 1 and 1.0 differ.
func KeyJSON(path string) KeyFunc {
	fields := strings.Split(path, ".")
	return func(m *Message) (string, error) {
		raw := json.RawMessage(m.Value)
		for _, f := range fields {
			var object map[string]json.RawMessage
			if err := json.Unmarshal(raw, &object); err != nil {
				return "", fmt.Errorf("no JSON object to find %q in", path)
			}
			next, ok := object[f]
			if !ok {
				return "", fmt.Errorf("the JSON value has no field %q", path)
			}
			raw = next
		}
		raw = bytes.TrimSpace(raw)
		if len(raw) > 0 && raw[0] == '"' {
			var s string
			err := json.Unmarshal(raw, &s)
			return s, err
		}
		if len(raw) > 0 && (raw[0] == '-' || raw[0] >= '0' && raw[0] <= '9') {
			return string(raw), nil
		}
		return "", fmt.Errorf("the JSON field %q is neither a string nor a number", path)
	}
}

// KeyPosition makes every record a message of its own, named by topic id,
// partition, leader epoch and offset. It suppresses redeliveries of a record,
// and nothing else: a record that a producer or a tool sent twice is two
// messages. The one exception is a letter of this group that was republished
// with its headers: it keeps the key of the record it came from.
func KeyPosition() KeyFunc {
	return func(m *Message) (string, error) {
		return positionKey(m.TopicID, m.Partition, m.LeaderEpoch, m.Offset), nil
	}
}

// positionPrefix begins the keys of KeyPosition.
const positionPrefix = "pos:"

func positionKey(topicID [16]byte, partition, epoch int32, offset int64) string {
	return fmt.Sprintf("%s%x/%d/%d/%d", positionPrefix, topicID[:], partition, epoch, offset)
}

// KeyCloudEvent takes source and id of a CloudEvents 1.0 message, which
// together are unique by that specification (section "id"). It reads the Kafka
// binding's binary mode (headers ce_source and ce_id) and, where these are
// missing, structured mode (a JSON value).
func KeyCloudEvent() KeyFunc {
	return func(m *Message) (string, error) {
		source, ok1 := m.Header("ce_source")
		id, ok2 := m.Header("ce_id")
		if ok1 || ok2 {
			return cloudEventKey(string(source), string(id))
		}
		var event struct {
			Source string `json:"source"`
			ID     string `json:"id"`
		}
		if err := json.Unmarshal(m.Value, &event); err != nil {
			return "", errors.New("neither ce_id and ce_source headers nor a JSON CloudEvent")
		}
		return cloudEventKey(event.Source, event.ID)
	}
}

func cloudEventKey(source, id string) (string, error) {
	if source == "" || id == "" {
		return "", errors.New("the CloudEvent lacks id or source")
	}
	return strconv.Itoa(len(source)) + ":" + source + id, nil
}

// KeyFirst takes the first key that one of funcs finds. The functions share
// one space of keys: "7" of the first is the same message as "7" of the second.
func KeyFirst(funcs ...KeyFunc) KeyFunc {
	return func(m *Message) (string, error) {
		errs := make([]error, 0, len(funcs))
		for _, f := range funcs {
			key, err := f(m)
			if err == nil && key != "" {
				return key, nil
			}
			errs = append(errs, err)
		}
		return "", errors.Join(errs...)
	}
}
