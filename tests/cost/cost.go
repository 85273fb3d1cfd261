// SPDX-License-Identifier: Apache-2.0

package cost

import "runtime"

// Allocated is how many bytes are allocated while something is done, also those that are free
// again by its end.
func Allocated(do func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	do()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}
