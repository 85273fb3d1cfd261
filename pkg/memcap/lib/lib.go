// SPDX-License-Identifier: Apache-2.0

package lib

// Where things are in a container that holds a claim.
const (
	Root      = "/usr/lib/gpu-agent"
	RealCUDA  = Root + "/driver/libcuda.so.1"      // the driver's own library
	RealNVML  = Root + "/driver/libnvidia-ml.so.1" // likewise
	LimitsDir = Root + "/limits"                   // a limit page for each GPU of the claim, read-only
	UsageDir  = Root + "/usage"                    // a tmpfs of the container's own, for the usage pages
	OpenMark  = Root + "/open"                     // there: what cannot be counted passes
	CompatDir = "/usr/local/cuda/compat"           // where images bring driver libraries of their own
)

// None is the limit of a GPU without one.
const None = ^uint64(0)

// DefaultContext is what a context is charged with before any was measured, in
// bytes. On data-centre GPUs of 2020 to 2025 a context with a usual program's
// modules has 250 to 550 MiB.
const DefaultContext = 512 << 20

// MostContext is the most that a context is ever charged with, in bytes. What one
// takes is learnt from counters that a container writes itself: more would let it
// say that nobody else on that GPU may have one.
const MostContext = DefaultContext + DefaultContext/2
