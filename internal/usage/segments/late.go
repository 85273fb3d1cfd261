// SPDX-License-Identifier: Apache-2.0

package segments

import "example.com/gpu-agent/internal/usage"

// Late opens its Store at the first use, and tries again at each use until that succeeds. So a
// journal that cannot be opened does not keep the agent from starting.
type Late struct {
	Dir     string
	Options Options
	store   *Store
}

func (l *Late) open() (err error) {
	if l.store == nil {
		l.store, err = Open(l.Dir, l.Options)
	}
	return err
}

// Last is Store's.
func (l *Late) Last(apply func(*usage.Record)) error {
	if err := l.open(); err != nil {
		return err
	}
	return l.store.Last(apply)
}

// Append is Store's.
func (l *Late) Append(lines []byte) (int, error) {
	if err := l.open(); err != nil {
		return 0, err
	}
	return l.store.Append(lines)
}

// Full is Store's.
func (l *Late) Full() bool { return l.store != nil && l.store.Full() }

// Fresh is Store's.
func (l *Late) Fresh() bool { return l.store == nil || l.store.Fresh() }

// Next is Store's.
func (l *Late) Next(first []byte) error {
	if err := l.open(); err != nil {
		return err
	}
	return l.store.Next(first)
}

// Tidy is Store's.
func (l *Late) Tidy() error {
	if err := l.open(); err != nil {
		return err
	}
	return l.store.Tidy()
}

// Flush is Store's.
func (l *Late) Flush() error {
	if err := l.open(); err != nil {
		return err
	}
	return l.store.Flush()
}

// Dropped is Store's.
func (l *Late) Dropped() []usage.Record {
	if l.store == nil {
		return nil
	}
	return l.store.Dropped()
}
