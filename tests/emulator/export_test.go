// SPDX-License-Identifier: Apache-2.0

package emulator

import "time"

// SleepWith puts f in place of the time that operations take; before the first.
func (w *World) SleepWith(f func(time.Duration)) { w.sleep = f }
