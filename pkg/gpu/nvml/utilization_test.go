// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"maps"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// A process's figure is the mean of its samples; what is no sample of these seconds is left
// out.
func TestBusy(t *testing.T) {
	got := busy([]nvml.ProcessUtilizationSample{
		{Pid: 10, TimeStamp: 100, SmUtil: 30}, {Pid: 10, TimeStamp: 200, SmUtil: 50}, {Pid: 11, TimeStamp: 150, SmUtil: 100},
		{Pid: 12, TimeStamp: 99, SmUtil: 70},               // of before
		{Pid: 0, TimeStamp: 150, SmUtil: 70},               // of nobody
		{Pid: 13, TimeStamp: 150, SmUtil: ^uint32(0)},      // not available
		{Pid: 14, TimeStamp: 150, SmUtil: 0, MemUtil: 100}, // idle
	}, 100)
	if want := map[int]float64{10: 40, 11: 100, 14: 0}; !maps.Equal(got, want) {
		t.Errorf("busy are %v, want %v", got, want)
	}
}
