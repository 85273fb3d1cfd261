// SPDX-License-Identifier: Apache-2.0

package emulator

import "time"

// SleepWith puts f in place of the time that operations take; before the first.
func (w *World) SleepWith(f func(d time.Duration, dead <-chan struct{})) { w.sleep = f }

// Sleep is what operations wait by.
func (w *World) Sleep() func(time.Duration, <-chan struct{}) { return w.sleep }
