// SPDX-License-Identifier: Apache-2.0

package lib

import "encoding/binary"

// Moved reports whether anything has happened since this meter's latest reading: something was
// counted, or a process asks for another reading. It costs a fraction of a reading. If it returns
// false after a quiet reading, another reading could differ only if the driver's figure does.
func (m *Meter) Moved(since Reading) (bool, error) {
	head := m.usage.head[:]
	if err := m.usage.readAt(head, 0); err != nil {
		return false, err
	}
	at := func(i int) uint64 { return binary.LittleEndian.Uint64(head[i:]) }
	return since.Nonce == 0 || at(useNonce) != since.Nonce || at(useBound) != since.Word || at(useAsks) != m.lastAsks ||
		at(useRefusals) != since.Refusals, nil
}

// Asked reports whether a process has asked for a reading since the last one began. It returns
// false if the page cannot be read; the next reading then returns the error.
func (m *Meter) Asked() bool {
	var word [8]byte
	return m.usage.readAt(word[:], useAsks) == nil && binary.LittleEndian.Uint64(word[:]) != m.lastAsks
}
