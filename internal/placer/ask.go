// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"slices"
	"time"
)

// Pod is what is known of a pod, and at is the node where it is, has a reservation, or is
// nominated; empty where there is none.
func (b *Books) Pod(uid string) (p Pod, at string) {
	if e := b.pods[uid]; e != nil {
		return e.Pod, e.at
	}
	return Pod{}, ""
}

// Lapsed are the nodes where reservations have ended by themselves since the last call.
func (b *Books) Lapsed(now time.Time) []string {
	b.expire(now)
	out := b.lapsed
	b.lapsed = nil
	slices.Sort(out)
	return slices.Compact(out)
}

// News returns a number that changes whenever there may be new room.
func (b *Books) News() uint64 { return b.news }

// Refresh works out the room of up to most nodes that have changed, so that the next question need not.
// more is true when there are others. A question about 1,000 nodes takes 100 to 200 ms in new books,
// and less than 1 ms after that.
func (b *Books) Refresh(most int) (more bool) {
	for name, n := range b.nodes {
		if n.room == nil && most == 0 {
			return true
		} else if n.room == nil {
			b.room(name).expect()
			most--
		}
	}
	return false
}

// HasRoom reports whether Place would find room on a node for a pod that is nowhere yet. It
// costs less than Fits where much is asked of one node, and leaves reservations as they are,
// also those whose time has come.
func (b *Books) HasRoom(p Pod, name string) bool {
	b.holds.balance()
	return b.judge(newAsk(p), name, yieldNothing).why == ""
}

// Running reports whether pods of a hold are on nodes, and are not ending.
func (b *Books) Running(id string) bool {
	for _, e := range b.pods {
		if e.Hold == id && e.Node != "" && !e.Ending && !e.Done {
			return true
		}
	}
	return false
}

// Holds returns the IDs of all holds for groups, sorted.
func (b *Books) Holds() (ids []string) {
	for id, h := range b.holds.by {
		if h.want == nil {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}
