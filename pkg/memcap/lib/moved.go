// SPDX-License-Identifier: Apache-2.0

package lib

import "encoding/binary"

// Moved says whether anything has happened since a reading of this meter, the
// latest: something was counted, or somebody asks for another reading. It costs
// a fraction of a reading, and after a quiet one that has not moved another
// would say the same if the driver does.
func (m *Meter) Moved(since Reading) (bool, error) {
	head := m.usage.head[:]
	if err := m.usage.readAt(head, 0); err != nil {
		return false, err
	}
	at := func(i int) uint64 { return binary.LittleEndian.Uint64(head[i:]) }
	return since.Nonce == 0 || at(useNonce) != since.Nonce || at(useBound) != since.Word || at(useAsks) != m.lastAsks ||
		at(useRefusals) != since.Refusals, nil
}

// Asked reports whether a process has asked for a reading since the last one began. An error is
// the next reading's to tell.
func (m *Meter) Asked() bool {
	var word [8]byte
	return m.usage.readAt(word[:], useAsks) == nil && binary.LittleEndian.Uint64(word[:]) != m.lastAsks
}
