package dlq

import (
	"bytes"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/twmb/franz-go/pkg/kgo"
)

func letter() Envelope {
	o := Origin{Topic: "payments", TopicID: [16]byte{1, 2}, Partition: 3, LeaderEpoch: 7, Offset: 1 << 40, Timestamp: time.UnixMilli(1_700_000_000_123)}
	return Envelope{
		ID: LetterID("billing", o), Group: "billing", Origin: o, Attempts: 5, Code: "error", Message: "no such account", ErrorType: "*errors.errorString",
		Stack: "main.go:1", FirstFailure: time.Unix(1_700_000_000, 5).UTC(), LastFailure: time.Unix(1_700_000_100, 0).UTC(), Member: "host/1/ab",
		RecordKey: []byte("k"), Value: nil, Headers: []kgo.RecordHeader{{Key: "a", Value: []byte("1")}, {Key: "a", Value: nil}, {Key: "b", Value: []byte{}}},
	}
}

// What Record writes, ParseEnvelope reads, in both dialects.
func TestEnvelopeRoundTrip(t *testing.T) {
	for _, d := range []Dialect{Spring, Connect} {
		want := letter()
		got, ok := ParseEnvelope(want.Record("dlq", d, DefaultMaxAdded))
		if !ok {
			t.Fatal("no letter id found")
		}
		if d == Connect { // its dialect has no timestamp
			want.Origin.Timestamp = time.Time{}
		}
		want.Digest = [16]byte{}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("dialect %d:\n got %+v\nwant %+v", d, got, want)
		}
	}
}

// Spring's integers are big-endian bytes of four and eight (read by
// DeadLetterPublishingRecoverer's consumers), Connect's are decimal text.
func TestIntegersByDialect(t *testing.T) {
	e := letter()
	find := func(r *kgo.Record, key string) []byte {
		for _, h := range r.Headers {
			if h.Key == key {
				return h.Value
			}
		}
		t.Fatalf("no header %s", key)
		return nil
	}
	spring := e.Record("dlq", Spring, DefaultMaxAdded)
	if got := find(spring, "kafka_dlt-original-partition"); !bytes.Equal(got, []byte{0, 0, 0, 3}) {
		t.Errorf("partition %v", got)
	}
	if got := find(spring, "kafka_dlt-original-offset"); !bytes.Equal(got, []byte{0, 0, 1, 0, 0, 0, 0, 0}) {
		t.Errorf("offset %v", got)
	}
	connect := e.Record("dlq", Connect, DefaultMaxAdded)
	if got := find(connect, "__connect.errors.offset"); string(got) != "1099511627776" {
		t.Errorf("offset %q", got)
	}
}

func TestAddedBytesAreBounded(t *testing.T) {
	for _, limit := range []int{0, 1, 1000, DefaultMaxAdded} {
		e := letter()
		e.Message, e.Stack = strings.Repeat("ü", 50_000), strings.Repeat("s", 50_000)
		bare := letter()
		bare.Message, bare.Stack = "", ""
		r := e.Record("dlq", Spring, limit)
		added := size(r.Headers) - size(e.Headers)
		fixed := size(bare.Record("dlq", Spring, 0).Headers) - size(e.Headers)
		if added > max(limit, fixed) {
			t.Errorf("limit %d: %d bytes added", limit, added)
		}
		if back, _ := ParseEnvelope(r); !utf8.ValidString(back.Message) {
			t.Error("a character was cut in two")
		}
	}
}

// Any headers of any bytes: writing never panics, the user's survive in order,
// the framework's are replaced, and reading is safe.
func FuzzHeaders(f *testing.F) {
	f.Add("a", []byte("1"), HeaderLetterID, []byte("forged"), "msg")
	f.Add("kafka_dlt-original-offset", []byte{1}, HeaderOrigin, []byte("a b c d e"), "\x00\xff")
	f.Add(HeaderOrigin, []byte("t 00000000000000000000000000000000 1 2 3"), "", []byte(nil), "")
	f.Fuzz(func(t *testing.T, k1 string, v1 []byte, k2 string, v2 []byte, message string) {
		e := letter()
		e.Message = message
		e.Headers = []kgo.RecordHeader{{Key: k1, Value: v1}, {Key: k2, Value: v2}, {Key: k1, Value: v2}}
		r := e.Record("dlq", Spring, DefaultMaxAdded)
		got, ok := ParseEnvelope(r)
		if !ok || got.ID != e.ID || got.Origin.Offset != e.Origin.Offset {
			t.Fatalf("the letter's own headers were overridden: %+v", got)
		}
		var want []kgo.RecordHeader
		for _, h := range e.Headers {
			if !isFramework(h.Key) {
				want = append(want, h)
			}
		}
		if len(got.Headers) != len(want) {
			t.Fatalf("%d of %d headers survived", len(got.Headers), len(want))
		}
		for i := range want {
			if got.Headers[i].Key != want[i].Key || !bytes.Equal(got.Headers[i].Value, want[i].Value) {
				t.Fatalf("header %d changed", i)
			}
		}
		FirstOrigin(e.Headers)
		ParseEnvelope(&kgo.Record{Headers: e.Headers})
	})
}

func TestFirstOriginRoundTrip(t *testing.T) {
	e := letter()
	got, ok := FirstOrigin(e.Record("dlq", Spring, DefaultMaxAdded).Headers)
	want := e.Origin
	want.Timestamp = time.Time{}
	if !ok || got != want {
		t.Errorf("got %+v, %v", got, ok)
	}
}

func TestTopicNames(t *testing.T) {
	if got := TopicName("payments", "billing"); got != "payments.billing.dlq" {
		t.Error(got)
	}
	seen := map[string]bool{}
	for _, group := range []string{"a b", "a-b", "a/b", "ä", strings.Repeat("g", 300), strings.Repeat("g", 301), ""} {
		name := TopicName("t", group)
		if !IsLegalTopic(name) || seen[name] {
			t.Errorf("group %q gets %q", group, name)
		}
		seen[name] = true
	}
	for _, bad := range []string{"", ".", "..", "a b", "ä", strings.Repeat("x", 250)} {
		if IsLegalTopic(bad) {
			t.Errorf("%q is legal", bad)
		}
	}
}

// Letter ids differ in every part of the place, and not in the time.
func TestLetterIDsNameThePlace(t *testing.T) {
	o := Origin{Topic: "t", TopicID: [16]byte{1}, Partition: 1, LeaderEpoch: 1, Offset: 1}
	base := LetterID("g", o)
	ids := map[[16]byte]string{base: "base"}
	for name, change := range map[string]func(*Origin){
		"topic id": func(o *Origin) { o.TopicID[15] = 9 }, "partition": func(o *Origin) { o.Partition = 2 },
		"epoch": func(o *Origin) { o.LeaderEpoch = -1 }, "offset": func(o *Origin) { o.Offset = 2 },
	} {
		other := o
		change(&other)
		if had, ok := ids[LetterID("g", other)]; ok {
			t.Errorf("%s: the same id as %s", name, had)
		}
	}
	if LetterID("h", o) == base {
		t.Error("two groups share an id")
	}
	same := o
	same.Timestamp, same.Topic = time.Now(), "renamed"
	if LetterID("g", same) != base {
		t.Error("the id depends on more than the place")
	}
}

func ExampleParseEnvelope() {
	e := Envelope{Group: "billing", Origin: Origin{Topic: "payments", Partition: 3, Offset: 42}, Code: "no_account", Message: "account 7 does not exist"}
	r := e.Record("payments.billing.dlq", Spring, DefaultMaxAdded)
	back, ok := ParseEnvelope(r)
	fmt.Println(ok, back.Origin.Topic, back.Origin.Partition, back.Origin.Offset, back.Code, back.Message)
	// Output: true payments 3 42 no_account account 7 does not exist
}

func ExampleTopicName() {
	fmt.Println(TopicName("payments", "billing"))
	// Output: payments.billing.dlq
}
