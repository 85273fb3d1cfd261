// SPDX-License-Identifier: Apache-2.0

package nvml

// rooms are a Driver's, for tests that look into them.
type rooms struct {
	*session
	*presence
	*bell
	*readings
	*migSide
	*memoryLimits
	*partsReader
	*capabilities
	*survey
	*modes
	*events
}

func newRooms(s *session) *rooms {
	d := newDriver(s, "")
	in, seen, c := d.Survey.(*survey), d.events.(*events), d.Contents.(contents)
	return &rooms{
		session: s, presence: seen.presence, bell: seen.bell,
		readings: d.Readings.(*readings), migSide: d.Instances.(*migSide), memoryLimits: d.Limits.(*memoryLimits),
		partsReader: c.partsReader, capabilities: c.capabilities,
		survey: in, modes: d.Modes.(*modes), events: seen,
	}
}
