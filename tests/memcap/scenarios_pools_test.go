// SPDX-License-Identifier: Apache-2.0

package memcap

import "fmt"

// everyCUDA are the behaviours of pools, each by itself.
var everyCUDA = []string{"", "strict", "holes=remap", "large=blocks", "reuse=eager", "opportunistic=lazy,kernel-us=200", "follow=direct,kernel-us=200",
	"trim=passed,kernel-us=200", "shrink=never", "query=observes", "used=pending", "piece-mib=8", "piece-mib=64",
	"pool-max=exact", "pool-max=refuses,kernel-us=200", "pool-max=ignored", "version=12010"}

// poolsOfCUDA are those under which a pool of ours has no greatest size, too.
var poolsOfCUDA = []string{"", "strict", suggested, "strict,pool-max=ignored", "version=12010"}

var cuda13 = []string{"version=13000", "version=13040,strict"}

// poolPiece is by what pools grow, which they may have for the moment of an undo.
const poolPiece = 32 * MiB

const managedIsMore = "managed memory may be more than a card has"

// withinRoom: the program has never had more than the room, and nearly all of it,
// by its own books, since the driver's lack managed memory.
func withinRoom(o outcome) []string {
	if got := o.n("highest"); got > o.room || o.room-got >= 64*MiB {
		return []string{fmt.Sprintf("it had %d MiB in a room of %d", got/MiB, o.room/MiB)}
	}
	return nil
}

// workedBeside: what fits went on beside another thread's refusals, three times during each
// of three of eight of them. A thread that holds a lock while it is refused lets through
// one at most, and mostly none. The probe goes on until it has seen that: on a busy machine
// the thread does not always have its turn.
func workedBeside(o outcome) []string {
	if o.n("beside") < 3 || o.n("refused") != 0 {
		return []string{fmt.Sprintf("other work went on beside %d of 8 refusals at most, of %d; %d of it refused", o.n("beside"), o.n("refusals"), o.n("refused"))}
	}
	return nil
}

// poolScenarios are the rows of stream-ordered memory.
var poolScenarios = []scenario{
	{name: "eight-streams-take-run-and-give-back", cuda: poolsOfCUDA},
	{name: "freed-on-one-stream-wanted-on-another", cuda: poolsOfCUDA},
	{name: "holes-that-are-too-small", cuda: poolsOfCUDA, undo: poolPiece, check: func(o outcome) []string {
		if o.n("narrow") != o.room/(8*MiB) {
			return []string{fmt.Sprintf("%d requests of 8 MiB in a room of %d MiB", o.n("narrow"), o.room/MiB)}
		}
		return nil
	}},
	{name: "reuse-switched-off", cuda: everyCUDA},
	{name: "streams-destroyed-with-frees-under-way", cuda: everyCUDA},
	{name: "allocation-beside-a-refused-one", cuda: []string{"pool-max=ignored", "strict,pool-max=ignored"}, undo: poolPiece, generous: "a card counts no refusals of another thread", check: workedBeside},
	{name: "synchronize-beside-a-refused-one", cuda: []string{"pool-max=ignored", "strict,pool-max=ignored"}, undo: poolPiece, generous: "a card counts no refusals of another thread", check: workedBeside},
	// One that attempts, and one whose pool grew by more than had been reserved.
	{name: "threads-at-the-edge", cuda: everyCUDA, pieces: 2, check: func(o outcome) []string {
		if o.n("taken") < 8*250 {
			return []string{fmt.Sprintf("%d allocations in all", o.n("taken"))}
		}
		return nil
	}},
	{name: "less-than-a-piece-is-left", cuda: poolsOfCUDA, undo: poolPiece, generous: "a card that is nearly full grows a pool by just the request", check: func(o outcome) []string {
		if o.used > o.limit {
			return []string{fmt.Sprintf("%d MiB are left of what was undone, %d beyond the cap", o.used/MiB, (o.used-o.limit)/MiB)}
		}
		return nil
	}},
	{name: "pool-that-keeps-what-it-has", cuda: []string{"ipc-pools=kept", "ipc-pools=kept,piece-mib=2", "strict", "ipc-pools=shrink"}},
	{name: "pool-that-shrinks-by-itself", cuda: []string{"", "query=observes", "strict"}},
	{name: "pool-that-maps-anew-at-the-edge", cuda: []string{"", "large=blocks", "holes=remap", "kernel-us=500"}, check: func(o outcome) []string {
		if o.n("fell") != 0 || o.n("had") < o.room-8*MiB {
			return []string{fmt.Sprintf("the pool has given back %d times, and served %d MiB of %d", o.n("fell"), o.n("had")/MiB, o.room/MiB)}
		}
		return nil
	}},
	{name: "default-pool-by-every-name", cuda: []string{"", "strict", "pool-max=ignored", "version=12010", "version=13040"}, check: func(o outcome) []string {
		if o.n("other") != 0 {
			return []string{fmt.Sprintf("%d answers of another pool", o.n("other"))}
		}
		return nil
	}},
	{name: "three-hundred-pools", check: func(o outcome) []string {
		if o.n("refused") != 0 {
			return []string{fmt.Sprintf("%d of 1200 calls refused", o.n("refused"))}
		}
		return nil
	}},
	{name: "managed-pool-of-the-device", cuda: cuda13, generous: managedIsMore, check: withinRoom},
	{name: "managed-pool-of-nowhere", cuda: cuda13, generous: managedIsMore, check: withinRoom},
	{name: "managed-pool-of-the-host", cuda: cuda13, generous: managedIsMore, check: withinRoom},
	{name: "default-managed-pool", cuda: cuda13, generous: managedIsMore, check: withinRoom},
	{name: "pool-of-a-locality-domain", cuda: []string{"version=13040", "version=13040,strict"}, check: withinRoom},
}
