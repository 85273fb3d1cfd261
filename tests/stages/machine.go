// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"time"
)

// machine is what the processors of a machine did, all together.
type machine struct {
	busy   time.Duration // they worked, for whomever
	stolen time.Duration // the machine's own host gave them to others
	spent  time.Duration // went by
}

// userHZ is the unit of /proc/stat, the same on every Linux that Go knows.
const userHZ = 100

// readMachine reads what they did since the machine started; nothing where there is no
// /proc/stat.
func readMachine() machine {
	file, err := os.Open("/proc/stat")
	if err != nil {
		return machine{}
	}
	defer file.Close()
	var user, nice, system, idle, iowait, irq, softirq, steal int64
	if _, err := fmt.Fscanf(file, "cpu %d %d %d %d %d %d %d %d", &user, &nice, &system, &idle, &iowait, &irq, &softirq, &steal); err != nil {
		return machine{}
	}
	ticks := func(n int64) time.Duration { return time.Duration(n) * time.Second / userHZ }
	busy := user + nice + system + irq + softirq
	return machine{busy: ticks(busy), stolen: ticks(steal), spent: ticks(busy + steal + idle + iowait)}
}

// until is what they did from m to later.
func (m machine) until(later machine) machine {
	return machine{busy: later.busy - m.busy, stolen: later.stolen - m.stolen, spent: later.spent - m.spent}
}
