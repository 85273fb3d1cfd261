// SPDX-License-Identifier: Apache-2.0

package nvml

// components are a Driver's, for tests that look into them.
type components struct {
	*session
	*presence
	*requests
	*readings
	*migSide
	*memoryLimits
	*partsReader
	*capabilities
	*survey
	*modes
	*events
}

func newComponents(s *session) *components {
	d := newDriver(s, "")
	in, seen, c := d.Survey.(*survey), d.events.(*events), d.Contents.(contents)
	return &components{
		session: s, presence: seen.presence, requests: seen.requests,
		readings: d.Readings.(*readings), migSide: d.Instances.(*migSide), memoryLimits: d.Limits.(*memoryLimits),
		partsReader: c.partsReader, capabilities: c.capabilities,
		survey: in, modes: d.Modes.(*modes), events: seen,
	}
}
