package consumer

import (
	"fmt"
	"time"
)

// Observer is told what happens. Each func may be nil. They are called from
// the engine's goroutines, several at once, and must return quickly: they hold
// up the partition that they report on.
type Observer struct {
	Outcome    func(Outcome)
	Paused     func(Pause)
	Assignment func(Assignment)
	Gap        func(Gap)
	Commit     func(Commit)
}

// Result says what became of a message.
type Result string

// The results of a message.
const (
	ResultDone      Result = "done"      // took effect now
	ResultDuplicate Result = "duplicate" // had taken effect, or had been buried, before
	ResultRetry     Result = "retry"     // failed, counted, is tried again later
	ResultSnoozed   Result = "snoozed"   // put off, not counted
	ResultBuried    Result = "buried"    // became a letter
	ResultSkipped   Result = "skipped"   // claimed without effect, as the handler asked
)

// Outcome is one message's result, after it is durable. It has no payload and
// no key on purpose.
type Outcome struct {
	Topic       string
	Partition   int32
	Offset      int64
	LeaderEpoch int32
	Result      Result
	Code        string // of a retry, snooze, letter or skip; the cause of a duplicate: redelivered, same_batch, buried
	Attempt     int    // counted attempts so far
	Err         error  // what the handler returned; may quote user data
	Runs        int    // how often the handler ran for it in this process
	Latency     time.Duration
}

// Pause is the begin or the end of a pause.
type Pause struct {
	Topic     string // "" when the whole process pauses
	Partition int32
	Reason    PauseReason
	Detail    string
	On        bool // false: resumed
}

// PauseReason says why a partition is not being fetched or run.
type PauseReason string

// The reasons of a pause.
const (
	PauseAcquiring  PauseReason = "acquiring"   // taking the partition over
	PauseBacklog    PauseReason = "backlog"     // as much is buffered as is allowed
	PauseOutage     PauseReason = "outage"      // Postgres, or a dependency named by the handler, is down
	PauseFloodGuard PauseReason = "flood_guard" // too much fails with nothing succeeding
	PauseDraining   PauseReason = "draining"    // being revoked or shut down
	PauseStopped    PauseReason = "stopped"     // waits for a person: gap, position_missing
)

// AssignmentChange is a step in the life of an assignment.
type AssignmentChange string

// The steps of an assignment's life.
const (
	Assigned AssignmentChange = "assigned" // Kafka gave us the partition
	Acquired AssignmentChange = "acquired" // we are its owner in Postgres and know where to start
	Fenced   AssignmentChange = "fenced"   // another process owns it in Postgres
	Revoked  AssignmentChange = "revoked"
	Lost     AssignmentChange = "lost"
)

// Assignment reports a step in the life of an assignment.
type Assignment struct {
	Topic     string
	Partition int32
	Change    AssignmentChange
	Offset    int64 // acquired: where it starts; revoked: its last checkpoint
	Rule      string
	Member    string
}

// GapKind says what a [Gap] is about.
type GapKind string

// The kinds of gaps. The last three move the position without a loss that we
// could name; their ranges say what is read again, or what was skipped.
const (
	GapRetention       GapKind = "retention"        // records were deleted by retention before we read them
	GapTruncation      GapKind = "truncation"       // the log is shorter than our position
	GapMovedForward    GapKind = "moved_forward"    // an operator or tool moved the group's offset forward
	GapMovedBack       GapKind = "moved_back"       // an operator or tool moved the group's offset back; claims hold
	GapRecreated       GapKind = "recreated"        // the topic was deleted and created again
	GapPositionMissing GapKind = "position_missing" // Kafka has our commit, Postgres has no position
	GapHistory         GapKind = "history"          // Postgres is not where we left it: restored or failed over
)

// Gap is a range [From, To) of offsets that was not delivered, or about which
// Kafka and Postgres disagree. Each is also a row of the gap table.
type Gap struct {
	Topic     string
	TopicID   [16]byte
	Partition int32
	Kind      GapKind
	From, To  int64
	Detail    string
}

func (g Gap) String() string {
	return fmt.Sprintf("%s: %s/%d offsets %d to %d: %s", g.Kind, g.Topic, g.Partition, g.From, g.To, g.Detail)
}

// Commit is one checkpoint of one partition.
type Commit struct {
	Topic     string
	Partition int32
	Offset    int64
	Kafka     error // nil: the broker has it too
}
