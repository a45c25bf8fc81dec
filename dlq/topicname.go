package dlq

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
)

// maxTopic is Kafka's limit for the name of a topic.
const maxTopic = 249

const suffix = ".dlq"

// TopicName is the default name of a DLQ topic: "<topic>.<group>.dlq". Where
// the group has characters that a topic can't have, or the name would be too
// long, it is made legal and gets a short hash, so that two groups never share
// a topic by accident.
func TopicName(topic, group string) string {
	name := topic + "." + group + suffix
	legal := strings.Map(func(c rune) rune {
		if legalChar(c) {
			return c
		}
		return '-'
	}, topic+"."+group)
	if legal+suffix == name && len(name) <= maxTopic {
		return name
	}
	sum := sha256.Sum256([]byte(topic + "\x00" + group))
	tail := "." + hex.EncodeToString(sum[:4]) + suffix
	return legal[:min(len(legal), maxTopic-len(tail))] + tail
}

// IsLegalTopic reports whether Kafka accepts name as the name of a topic.
func IsLegalTopic(name string) bool {
	return name != "" && name != "." && name != ".." && len(name) <= maxTopic &&
		!strings.ContainsFunc(name, func(c rune) bool { return !legalChar(c) })
}

func legalChar(c rune) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '.' || c == '_' || c == '-'
}
