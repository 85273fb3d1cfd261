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

// DefaultContext is what a context is charged with before a claim's own were
// measured, and the most that one ever is, in bytes. On data-centre GPUs of 2020 to
// 2025 a context with a usual program's modules has 250 to 550 MiB. LeastContext is
// the least: who is charged with too little has more than its cap until the next
// reading, and this much is within the watchdog's tolerance.
const (
	DefaultContext = 512 << 20
	LeastContext   = 64 << 20
)
