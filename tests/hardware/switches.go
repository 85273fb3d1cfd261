// SPDX-License-Identifier: Apache-2.0

package hardware

// Switches are those of the emulated CUDA driver for what NVIDIA's documentation leaves open, by
// name, with the values that are told apart, and what else the emulator needs for them before. A
// program tells a driver's behaviours apart (testdata/switches.c): on the emulator it has to find
// what each switch says, and on hardware it says which is the real one, so that one day the
// switch can go.
var Switches = map[string][]string{
	"version":        {"version=11080", "version=13040"},
	"piece-mib":      {"piece-mib=32", "piece-mib=4"},
	"holes":          {"holes=fit", "holes=remap"},
	"large":          {"large=pieces", "large=blocks"},
	"reuse":          {"reuse=documented", "reuse=eager"},
	"opportunistic":  {"opportunistic=documented", "opportunistic=lazy"},
	"follow":         {"follow=all", "follow=direct"},
	"trim":           {"trim=passed", "trim=observed"},
	"shrink":         {"shrink=synchronize", "shrink=never"},
	"query":          {"query=nothing", "query=observes"},
	"used":           {"used=live", "used=pending"},
	"ipc-pools":      {"ipc-pools=kept", "ipc-pools=shrink"},
	"pool-max":       {"pool-max=exact", "pool-max=piece", "pool-max=refuses", "pool-max=ignored"},
	"pool-memory":    {"pool-memory=device", "pool-memory=context"},
	"domains":        {"version=13040,domains=1", "version=13040,domains=3"},
	"loading":        {"loading=lazy", "loading=eager"},
	"heap":           {"heap=set", "heap=launch", "heap=use"},
	"graphs":         {"graphs=distinct", "graphs=ordered"},
	"green-mib":      {"green-mib=2", "green-mib=10"},
	"managed-create": {"managed-create=refused", "managed-create=made"},
}
