package consumer

import "sort"

// watermark tracks the records of one assignment that were delivered, in
// offset order, and knows the offset below which all of them are resolved. It
// never does arithmetic on offsets: logs have holes (compaction, transaction
// markers). It is a plain value; the assignment's lock guards it.
type watermark struct {
	marks []mark
	next  int64
	epoch int32
}

type mark struct {
	offset   int64
	epoch    int32
	resolved bool
}

// startWatermark begins at a position that was decided by an acquire.
func startWatermark(next int64, epoch int32) watermark {
	return watermark{next: next, epoch: epoch}
}

// deliver adds a record. Offsets must rise; one that does not is refused.
func (w *watermark) deliver(offset int64, epoch int32) bool {
	if offset < w.expected() {
		return false
	}
	w.marks = append(w.marks, mark{offset: offset, epoch: epoch})
	return true
}

// expected is the lowest offset that may be delivered next.
func (w *watermark) expected() int64 {
	if n := len(w.marks); n > 0 {
		return w.marks[n-1].offset + 1
	}
	return w.next
}

// resolve marks a delivered record as resolved and moves the watermark over
// everything that is. Resolving twice, or an offset that was not delivered,
// changes nothing and returns false.
func (w *watermark) resolve(offset int64) bool {
	i := sort.Search(len(w.marks), func(i int) bool { return w.marks[i].offset >= offset })
	if i == len(w.marks) || w.marks[i].offset != offset || w.marks[i].resolved {
		return false
	}
	w.marks[i].resolved = true
	n := 0
	for n < len(w.marks) && w.marks[n].resolved {
		w.next, w.epoch = w.marks[n].offset+1, w.marks[n].epoch
		n++
	}
	if n > 0 {
		w.marks = w.marks[n:]
		if len(w.marks) == 0 {
			w.marks = nil
		}
	}
	return true
}

// ahead is how many records were delivered past the watermark.
func (w *watermark) ahead() int { return len(w.marks) }

// head is the offset of the first unresolved record.
func (w *watermark) head() (int64, bool) {
	if len(w.marks) == 0 {
		return 0, false
	}
	return w.marks[0].offset, true
}
