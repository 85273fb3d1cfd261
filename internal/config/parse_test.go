// SPDX-License-Identifier: Apache-2.0

package config

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// head is the beginning of a file whose entries start on line 4.
const head = "version: v1\npartitions:\n  default:\n"

// migHead is the same for NVIDIA's MIG manager.
const migHead = "version: v1\nmig-configs:\n  custom:\n"

// broken is files with all that is wrong with them. Messages are golden: they
// are what an operator reads.
var broken = []struct {
	name string
	in   string
	want []string
}{
	// The file as a whole.
	{"nothing at all", "", []string{"f:1: the file is empty: it needs `version: v1` and `partitions:`"}},
	{"only comments", "# to be written\n\n", []string{"f:1: the file is empty: it needs `version: v1` and `partitions:`"}},
	{"only null", "---\n~\n", []string{"f:1: the file is empty: it needs `version: v1` and `partitions:`"}},
	{"a list", "- devices: all\n", []string{"f:1: a partition file is a mapping, not a list"}},
	{"a word", "shared\n", []string{"f:1: a partition file is a mapping, not the text \"shared\""}},
	{"not UTF-8", "version: v1\n# caf\xe9\n", []string{"f:2: the text is not UTF-8"}},
	{"UTF-16", "\xff\xfev\x00e\x00", []string{"f:1: the text is not UTF-8"}},
	{"a control character", "version: v1\npartitions: \x00\n", []string{"f:2: the text holds the control character U+0000"}},
	{"a line break of YAML alone", "version: v1\n# x\u2028\n", []string{"f:2: the text holds the control character U+2028"}},
	{"old Mac lines", "version: v1\rpartitions:\r", []string{"f:1: the text holds a carriage return without a line feed"}},
	{"too large", "version: v1\n" + strings.Repeat("#", 1<<20), []string{"f:1: the file has 1048588 bytes: at most 1048576 are read, which is what a ConfigMap holds"}},
	{"two documents", head + "    - {devices: all, mode: off}\n---\nversion: v1\n", []string{"f:5: a second YAML document begins here: a partition file is one document"}},
	{"a manifest", "apiVersion: v1\nkind: ConfigMap\ndata: {}\n", []string{"f:1: this is a Kubernetes manifest: a partition file is the content of its data's key config.yaml"}},

	// YAML that does not parse: the line to change, not the one before.
	{"a tab", "version: v1\npartitions:\n\tdefault:\n", []string{"f:3: a tab cannot indent YAML: use spaces"}},
	{"a tab inside an entry", head + "    - devices: all\n\t  mode: off\n", []string{"f:5: a tab cannot indent YAML: use spaces"}},
	{"indented too little", head + "    - devices: all\n     mode: off\n", []string{"f:5: the file is not YAML: did not find expected '-' indicator"}},
	{"indented too much", "version: v1\n  partitions:\n", []string{"f:2: the file is not YAML: mapping values are not allowed in this context"}},
	{"an item indented too little", head + "    - {devices: [0], mode: off}\n   - {devices: [1], mode: off}\n", []string{"f:5: the file is not YAML: did not find expected key"}},
	{"a bracket left open", head + "    - devices: [0, 1\n      mode: off\n    - devices: [2]\n      mode: off\n", []string{"f:4: the file is not YAML: did not find expected ',' or ']'"}},
	{"a brace left open", head + "    - devices: {model: H100\n      mode: off\n", []string{"f:4: the file is not YAML: did not find expected ',' or '}'"}},
	{"a quote left open", head + "    - devices: \"all\n      mode: off\n", []string{"f:4: the file is not YAML: found unexpected end of stream"}},
	{"a quote left open far up", "version: \"v1\n" + strings.Repeat("# a comment\n", 500), []string{"f:1: the file is not YAML: found unexpected end of stream"}},
	{"a text of two lines before a quote left open", head + "    - devices: \"a\n        b\"\n      mode: 'off\n", []string{"f:6: the file is not YAML: found unexpected end of stream"}},
	{"no colon", head + "    - devices: all\n      mode off\n", []string{"f:5: the file is not YAML: could not find expected ':'"}},
	{"no such anchor", head + "    - devices: *all\n      mode: off\n", []string{"f:4: the file is not YAML: unknown anchor 'all' referenced"}},
	{"a stray brace", "version: v1\n}\n", []string{"f:2: the file is not YAML: did not find expected key"}},
	{"windows lines", "version: v1\r\npartitions: [\r\n", []string{"f:2: the file is not YAML: did not find expected node content"}},
	{"a directive", "%YAML 3.0\n---\nversion: v1\n", []string{"f:1: the file is not YAML: found incompatible YAML document"}},

	// Aliases.
	{"an anchor in itself", "version: v1\npartitions: &p\n  default: *p\n", []string{"f:2: the anchor \"p\" contains itself"}},
	{"a merge of itself", "version: v1\npartitions: &p\n  <<: *p\n", []string{"f:2: the anchor \"p\" contains itself"}},
	{"a merge of a list of words", head + "    - {<<: [all], devices: all, mode: off}\n", []string{"f:4: the merge key << takes a mapping or a list of mappings"}},
	{"a bomb", bomb(), []string{"f:3: the aliases of this file add up to more than 10000 values: write them out"}},
	{"one mistake behind two aliases", head + "    - &e {devices: all, mode: shard}\n  other: [*e]\n", []string{"f:4: mode is whole, shared, mig, dynamic or off, not the text \"shard\""}},

	// The top.
	{"no version", "partitions:\n  a: [{devices: all, mode: off}]\n", []string{"f:1: the version is missing: this program knows `version: v1`"}},
	{"another version", "# x\nversion: v2\npartitions: 7\n", []string{"f:2: the version is the text \"v2\": this program knows v1"}},
	{"version as a number", "version: 1\npartitions: {}\n", []string{"f:1: the version is the number \"1\": this program knows v1"}},
	{"no partitions", "version: v1\n", []string{"f:1: the file has no partitions: they belong under `partitions:`"}},
	{"partitions empty", "version: v1\npartitions: {}\n", []string{"f:2: partitions is empty: it needs at least one name with a list of entries"}},
	{"partitions null", "version: v1\npartitions:\n", []string{"f:2: partitions is a mapping, not nothing"}},
	{"both schemas", "version: v1\npartitions: {}\nmig-configs: {}\n", []string{"f:3: a file has partitions or, for NVIDIA's MIG manager, mig-configs, not both"}},
	{"a mistyped key", "version: v1\npartition:\n  a: []\n", []string{
		"f:1: the file has no partitions: they belong under `partitions:`",
		"f:2: unknown key \"partition\": did you mean \"partitions\"?"}},
	{"a key of its own", head + "    - {devices: all, mode: off}\nnodes: [a]\n", []string{"f:5: unknown key \"nodes\": a partition file has version, partitions and mig-configs"}},
	{"a key twice", "version: v1\nversion: v1\npartitions: {a: [{devices: all, mode: off}]}\n", []string{"f:2: the key \"version\" is already on line 1"}},

	// Partitions.
	{"a partition twice", head + "    - {devices: all, mode: off}\n  default:\n    - {devices: all, mode: whole}\n", []string{"f:5: the key \"default\" is already on line 3"}},
	{"a partition without entries", head + "    []\n", []string{"f:4: partition \"default\" is an empty list"}},
	{"a partition of null", head, []string{"f:3: partition \"default\" is a list, not nothing"}},
	{"a name without a value at the end of the file", "version: v1\npartitions:\n  ? x", []string{"f:3: partition \"x\" is a list, not nothing"}},
	{"a partition without the dash", head + "    devices: all\n    mode: off\n", []string{"f:4: partition \"default\" is a list, not a mapping"}},
	{"a name too long", "version: v1\npartitions:\n  " + strings.Repeat("x", 64) + ": [{devices: all, mode: off}]\n", []string{
		"f:3: the partition name \"" + strings.Repeat("x", 60) + "…\" is longer than 63 characters: it is chosen by the value of a node label"}},
	{"a name with a blank", "version: v1\npartitions:\n  my gpus: [{devices: all, mode: off}]\n", []string{
		"f:3: the partition name \"my gpus\" has a character other than letters, digits, '-', '_' and '.': it is chosen by the value of a node label"}},
	{"a name that ends in a dash", "version: v1\npartitions:\n  a-: [{devices: all, mode: off}]\n", []string{
		"f:3: the partition name \"a-\" does not begin and end with a letter or digit: it is chosen by the value of a node label"}},
	{"an empty name", "version: v1\npartitions:\n  \"\": [{devices: all, mode: off}]\n", []string{
		"f:3: the partition name \"\" is empty: it is chosen by the value of a node label"}},
	{"a number for a name", "version: v1\npartitions:\n  7: [{devices: all, mode: off}]\n", []string{"f:3: a key of partitions is text, not the number \"7\": put it in quotes"}},
	{"a list for a name", "version: v1\npartitions:\n  ? [a]\n  : [{devices: all, mode: off}]\n", []string{"f:3: a key of partitions is text, not a list"}},

	// Entries.
	{"an entry of text", head + "    - whole\n", []string{"f:4: an entry is a mapping, not the text \"whole\""}},
	{"an entry of nothing", head + "    -\n", []string{"f:4: an entry is a mapping, not nothing"}},
	{"an entry without devices and mode", head + "    - {}\n", []string{
		"f:4: the entry has no devices: all, a list of indices or UUIDs, or {model: pattern}",
		"f:4: the entry has no mode: whole, shared, mig, dynamic or off"}},
	{"an unknown mode", head + "    - devices: all\n      mode: share\n", []string{"f:5: mode is whole, shared, mig, dynamic or off, not the text \"share\""}},
	{"mode null", head + "    - devices: all\n      mode:\n", []string{"f:5: mode is whole, shared, mig, dynamic or off, not nothing"}},
	{"mode in capitals", head + "    - devices: all\n      Mode: off\n", []string{
		"f:4: the entry has no mode: whole, shared, mig, dynamic or off",
		"f:5: unknown key \"Mode\": did you mean \"mode\"?"}},
	{"a mistyped replicas", head + "    - devices: all\n      mode: shared\n      replica: 4\n", []string{"f:6: unknown key \"replica\": did you mean \"replicas\"?"}},
	{"a key that nothing resembles", head + "    - devices: all\n      mode: shared\n      color: red\n", []string{
		"f:6: unknown key \"color\": an entry has devices, mode, api, replicas, timeSlice, compute, spot, lend, geometry and profiles"}},
	{"mode twice", head + "    - devices: all\n      mode: shared\n      mode: off\n", []string{"f:6: the key \"mode\" is already on line 5"}},

	// Devices.
	{"devices: some", head + "    - {devices: some, mode: off}\n", []string{"f:4: devices is all, a list of indices or UUIDs, or {model: pattern}, not the text \"some\""}},
	{"devices: 0", head + "    - {devices: 0, mode: off}\n", []string{"f:4: devices is all, a list of indices or UUIDs, or {model: pattern}, not the number \"0\""}},
	{"no devices in the list", head + "    - {devices: [], mode: off}\n", []string{"f:4: devices is an empty list"}},
	{"a negative index", head + "    - {devices: [0, -3], mode: off}\n", []string{"f:4: an index is at least 0, not -3"}},
	{"an index twice", head + "    - devices:\n      - 0\n      - 1\n      - 0\n      mode: off\n", []string{"f:7: index 0 is in this list already, on line 5"}},
	{"an index in octal", head + "    - {devices: [010], mode: off}\n", []string{"f:4: an index is a whole number in decimal digits, not \"010\""}},
	{"an index with a point", head + "    - {devices: [1.0], mode: off}\n", []string{"f:4: an index is a whole number, not the number \"1.0\""}},
	{"an index past all bounds", head + "    - {devices: [18446744073709551615, 99999999999999999999], mode: off}\n", []string{
		"f:4: an index is at most 2147483647, not \"18446744073709551615\"",
		"f:4: an index is a whole number, not the number \"99999999999999999999\""}},
	{"an index in quotes", head + "    - {devices: [\"0\"], mode: off}\n", []string{"f:4: \"0\" is neither the index nor the UUID of a GPU: a UUID begins with \"GPU-\", an index has no quotes"}},
	{"a MIG instance", head + "    - {devices: [MIG-0a], mode: off}\n", []string{"f:4: \"MIG-0a\" is neither the index nor the UUID of a GPU: a partition lays out GPUs, and this names a MIG instance"}},
	{"half a UUID", head + "    - {devices: [GPU-], mode: off}\n", []string{"f:4: \"GPU-\" is neither the index nor the UUID of a GPU: after \"GPU-\" come hexadecimal digits and dashes"}},
	{"a UUID twice", head + "    - {devices: [GPU-0a, GPU-0a], mode: off}\n", []string{"f:4: GPU-0a is in this list already, on line 4"}},
	{"indices and UUIDs", head + "    - {devices: [0, GPU-0a], mode: off}\n", []string{"f:4: the list mixes indices and UUIDs: use one of the two"}},
	{"a list in the list", head + "    - {devices: [[0]], mode: off}\n", []string{"f:4: an index is a whole number, not a list"}},
	{"no model", head + "    - {devices: {}, mode: off}\n", []string{"f:4: devices has no model: {model: pattern}"}},
	{"an empty model", head + "    - {devices: {model: ''}, mode: off}\n", []string{"f:4: model is an empty pattern, which matches no GPU"}},
	{"a broken pattern", head + "    - {devices: {model: 'NVIDIA [AH'}, mode: off}\n", []string{"f:4: model \"NVIDIA [AH\" is not a pattern: a [ is not closed, or a \\ is at the end"}},
	{"a mistyped model", head + "    - {devices: {modle: 'NVIDIA*'}, mode: off}\n", []string{
		"f:4: unknown key \"modle\": did you mean \"model\"?",
		"f:4: devices has no model: {model: pattern}"}},

	// Sharing.
	{"no replicas", head + "    - {devices: all, mode: shared, replicas: 0}\n", []string{"f:4: replicas is at least 1, not 0"}},
	{"fewer than no replicas", head + "    - {devices: all, mode: shared, replicas: -1}\n", []string{"f:4: replicas is at least 1, not -1"}},
	{"too many replicas", head + "    - {devices: all, mode: shared, replicas: 1000000}\n", []string{"f:4: replicas is at most 30000, not 1000000"}},
	{"replicas as text", head + "    - {devices: all, mode: shared, replicas: '4'}\n", []string{"f:4: replicas is a whole number, not the text \"4\""}},
	{"replicas null", head + "    - devices: all\n      mode: shared\n      replicas:\n", []string{"f:6: replicas is a whole number, not nothing"}},
	{"a time slice of its own", head + "    - {devices: all, mode: shared, timeSlice: 2ms}\n", []string{"f:4: timeSlice is default, short, medium or long, not the text \"2ms\""}},
	{"spot by magic", head + "    - {devices: all, mode: shared, spot: yes please}\n", []string{"f:4: spot is true, false or {most: …}, not the text \"yes please\""}},
	{"spot of nothing", head + "    - devices: all\n      mode: shared\n      spot:\n", []string{"f:6: spot is true, false or {most: …}, not nothing"}},
	{"spot without most", head + "    - {devices: all, mode: shared, spot: {}}\n", []string{"f:4: spot is a mapping without most: write {most: …}, true, or false"}},
	{"spot at most nothing", head + "    - {devices: all, mode: shared, spot: {most: 0}}\n", []string{"f:4: most is at least 1, not 0"}},
	{"most of a whole GPU", head + "    - {devices: all, mode: whole, spot: {most: 1}}\n", []string{"f:4: most counts the units of a GPU's memory: this entry is whole, so write spot: true"}},
	{"spot of replicas", head + "    - {devices: all, mode: shared, replicas: 4, spot: true}\n", []string{
		"f:4: spot is for whole GPUs, units of memory and MIG instances, and this entry has replicas: leave out one of the two"}},
	{"lend without spot", head + "    - {devices: all, mode: shared, lend: {after: 15m}}\n", []string{
		"f:4: lend gives idle room to spot pods, and this entry offers them none: add spot: true, or leave out lend"}},
	{"lend with spot false", head + "    - devices: all\n      mode: shared\n      spot: false\n      lend: {after: 15m}\n", []string{
		"f:7: lend gives idle room to spot pods, and this entry offers them none: add spot: true, or leave out lend"}},
	{"lend by a word", head + "    - {devices: all, mode: shared, spot: true, lend: 15m}\n", []string{
		"f:4: lend is {after: …}, how long a holder must have been idle, not the text \"15m\""}},
	{"lend without after", head + "    - {devices: all, mode: shared, spot: true, lend: {}}\n", []string{
		"f:4: lend has no after: write {after: 15m}, how long a holder must have been idle"}},
	{"lend after a number", head + "    - {devices: all, mode: shared, spot: true, lend: {after: 15}}\n", []string{
		"f:4: after is a duration such as 15m or 2h, not the number \"15\""}},
	{"lend after no duration", head + "    - {devices: all, mode: shared, spot: true, lend: {after: soon}}\n", []string{
		"f:4: after is a duration such as 15m or 2h, not the text \"soon\""}},
	{"lend too soon", head + "    - {devices: all, mode: shared, spot: true, lend: {after: 59s}}\n", []string{"f:4: after is from 1m to 8760h, not \"59s\""}},
	{"lend before", head + "    - {devices: all, mode: shared, spot: true, lend: {after: -2h}}\n", []string{"f:4: after is from 1m to 8760h, not \"-2h\""}},
	{"lend too late", head + "    - {devices: all, mode: shared, spot: true, lend: {after: 9000h}}\n", []string{"f:4: after is from 1m to 8760h, not \"9000h\""}},
	{"lend of a dynamic GPU", head + "    - {devices: all, mode: dynamic, lend: {after: 15m}}\n", []string{
		"f:4: lend belongs to mode whole, shared or mig: this entry is dynamic",
		"f:4: lend gives idle room to spot pods, and this entry offers them none: add spot: true, or leave out lend"}},
	{"lend of replicas", head + "    - {devices: all, mode: shared, replicas: 2, spot: true, lend: {after: 15m}}\n", []string{
		"f:4: spot is for whole GPUs, units of memory and MIG instances, and this entry has replicas: leave out one of the two"}},
	{"spot of a dynamic GPU", head + "    - {devices: all, mode: dynamic, api: dra, spot: true}\n", []string{"f:4: spot belongs to mode whole, shared or mig: this entry is dynamic"}},
	{"compute by magic", head + "    - {devices: all, mode: shared, compute: mp}\n", []string{"f:4: compute is timeslice, mps or {mps: {factor: …, max: …}}, not the text \"mp\""}},
	{"compute of nothing", head + "    - devices: all\n      mode: shared\n      compute:\n", []string{"f:6: compute is timeslice, mps or {mps: {factor: …, max: …}}, not nothing"}},
	{"a list of computes", head + "    - {devices: all, mode: shared, compute: [mps]}\n", []string{"f:4: compute is timeslice, mps or {mps: {factor: …, max: …}}, not a list"}},
	{"a mapping without mps", head + "    - devices: all\n      mode: shared\n      compute: {}\n", []string{"f:6: compute is a mapping without mps: write {mps: {factor: …, max: …}}, mps, or timeslice"}},
	{"time slices as a mapping", head + "    - {devices: all, mode: shared, compute: {timeslice: {}}}\n", []string{
		"f:4: unknown key \"timeslice\": compute has mps",
		"f:4: compute is a mapping without mps: write {mps: {factor: …, max: …}}, mps, or timeslice"}},
	{"mps of nothing", head + "    - {devices: all, mode: shared, compute: {mps: }}\n", []string{"f:4: mps is a mapping, not nothing"}},
	{"a percentage of one's own", head + "    - devices: all\n      mode: shared\n      compute:\n        mps:\n          percent: 30\n", []string{"f:8: unknown key \"percent\": mps has factor and max"}},
	{"a factor too small", head + "    - devices: all\n      mode: shared\n      compute:\n        mps:\n          factor: 0\n          max: 0\n", []string{"f:8: factor is at least 0.1, not \"0\"", "f:9: max is at least 1, not 0"}},
	{"a factor too large", head + "    - {devices: all, mode: shared, compute: {mps: {factor: 100.5, max: 101}}}\n", []string{"f:4: factor is at most 100, not \"100.5\"", "f:4: max is at most 100, not 101"}},
	{"a factor beyond numbers", head + "    - {devices: all, mode: shared, compute: {mps: {factor: 1" + strings.Repeat("0", 40) + ".5}}}\n", []string{"f:4: factor is at most 100, not \"1" + strings.Repeat("0", 40) + ".5\""}},
	{"factors in other forms", head + "    - {devices: [0], mode: shared, compute: {mps: {factor: .inf}}}\n    - {devices: [1], mode: shared, compute: {mps: {factor: -1}}}\n    - {devices: [2], mode: shared, compute: {mps: {factor: 010}}}\n    - {devices: [3], mode: shared, compute: {mps: {factor: 2e0}}}\n    - {devices: [4], mode: shared, compute: {mps: {factor: '2'}}}\n", []string{
		"f:4: factor is a number in decimal digits, not \".inf\"",
		"f:5: factor is a number in decimal digits, not \"-1\"",
		"f:6: factor is a number in decimal digits, not \"010\"",
		"f:7: factor is a number in decimal digits, not \"2e0\"",
		"f:8: factor is a number, not the text \"2\""}},
	{"max in halves", head + "    - {devices: all, mode: shared, compute: {mps: {max: 50.5}}}\n", []string{"f:4: max is a whole number, not the number \"50.5\""}},
	{"a time slice beside mps", head + "    - devices: all\n      mode: shared\n      timeSlice: short\n      compute: mps\n", []string{
		"f:6: timeSlice is for containers that take turns, and with compute mps they run at the same time: leave out one of the two"}},
	{"more replicas than clients", head + "    - devices: all\n      mode: shared\n      replicas: 49\n      compute: {mps: {factor: 2}}\n", []string{
		"f:6: replicas is at most 48 with compute mps, not 49: an MPS server accepts 48 processes"}},
	{"keys of other modes", head + "    - devices: all\n      mode: whole\n      replicas: 0\n      timeSlice: short\n      compute: mps\n      geometry: {}\n      profiles: [1g]\n", []string{
		"f:6: replicas belongs to mode shared: this entry is whole",
		"f:6: replicas is at least 1, not 0",
		"f:7: timeSlice belongs to mode shared: this entry is whole",
		"f:8: compute belongs to mode shared: this entry is whole",
		"f:9: geometry belongs to mode mig: this entry is whole",
		"f:10: profiles belongs to mode mig or dynamic: this entry is whole",
		"f:10: \"1g\" is not a MIG profile name: a name is like 1g.10gb, 1g.10gb+me or 1c.3g.40gb",
		"f:10: profiles limits MIG on demand, and geometry is fixed: an entry has one of the two"}},
	{"an API that there is not", head + "    - devices: all\n      mode: whole\n      api: DRA\n", []string{`f:6: api is device-plugin or dra, not the text "DRA"`}},
	{"no API", head + "    - devices: all\n      mode: whole\n      api:\n", []string{"f:6: api is device-plugin or dra, not nothing"}},
	{"a geometry that is made on demand", head + "    - {devices: all, mode: dynamic, api: dra, geometry: {1g.10gb: 1}, replicas: 2}\n", []string{
		"f:4: replicas belongs to mode shared: this entry is dynamic", "f:4: geometry belongs to mode mig: this entry is dynamic"}},
	{"the API of nothing", head + "    - {devices: all, mode: off, api: dra}\n", []string{"f:4: api is for a GPU that is offered: this entry is off"}},
	{"replicas of nothing", head + "    - {devices: all, mode: off, replicas: 2}\n", []string{"f:4: replicas belongs to mode shared: this entry is off"}},
	{"replicas of MIG", head + "    - {devices: all, mode: mig, replicas: 2}\n", []string{"f:4: replicas belongs to mode shared: this entry is mig"}},

	// MIG.
	{"geometry and profiles", head + "    - {devices: all, mode: mig, geometry: {}, profiles: [1g.10gb]}\n", []string{"f:4: profiles limits MIG on demand, and geometry is fixed: an entry has one of the two"}},
	{"geometry null", head + "    - devices: all\n      mode: mig\n      geometry:\n", []string{"f:6: geometry is a mapping, not nothing"}},
	{"geometry as a list", head + "    - {devices: all, mode: mig, geometry: [1g.10gb]}\n", []string{"f:4: geometry is a mapping, not a list"}},
	{"a profile that is none", head + "    - {devices: all, mode: mig, geometry: {1g.10: 1}}\n", []string{"f:4: \"1g.10\" is not a MIG profile name: a name is like 1g.10gb, 1g.10gb+me or 1c.3g.40gb"}},
	{"a profile of all slices", head + "    - {devices: all, mode: mig, geometry: {3c.3g.40gb: 1}}\n", []string{"f:4: \"3c.3g.40gb\" is not a MIG profile name: 3c of 3g is all of it: leave out 3c."}},
	{"a count of zero", head + "    - {devices: all, mode: mig, geometry: {1g.10gb: 0}}\n", []string{"f:4: the count of \"1g.10gb\" is at least 1, not 0"}},
	{"a count that is none", head + "    - {devices: all, mode: mig, geometry: {1g.10gb: many}}\n", []string{"f:4: the count of \"1g.10gb\" is a whole number, not the text \"many\""}},
	{"a profile twice", head + "    - {devices: all, mode: mig, geometry: {1g.10gb: 1, 1g.10gb: 2}}\n", []string{"f:4: the key \"1g.10gb\" is already on line 4"}},
	{"no profiles", head + "    - {devices: all, mode: mig, profiles: []}\n", []string{"f:4: profiles is an empty list"}},
	{"one of the profiles twice", head + "    - devices: all\n      mode: mig\n      profiles:\n      - 1g.10gb\n      - 1g.10gb\n", []string{"f:8: 1g.10gb is in this list already, on line 7"}},
	{"a part among the profiles", head + "    - {devices: all, mode: mig, profiles: [1c.3g.40gb]}\n", []string{"f:4: 1c.3g.40gb is a part of an instance, which is not made on demand: name 3g.40gb, or write a geometry"}},
	{"a number among the profiles", head + "    - {devices: all, mode: mig, profiles: [1]}\n", []string{"f:4: a profile is text, not the number \"1\""}},

	// NVIDIA's MIG manager.
	{"an item without everything", migHead + "  - {}\n", []string{
		"f:4: the item has no devices: all or a list of indices",
		"f:4: the item has no mig-enabled: true or false"}},
	{"no mig-devices", migHead + "  - {devices: all, mig-enabled: true}\n", []string{"f:4: the item has mig-enabled: true and no mig-devices: no instance is written {}"}},
	{"mig-devices null", migHead + "  - devices: all\n    mig-enabled: true\n    mig-devices:\n", []string{"f:4: the item has mig-enabled: true and no mig-devices: no instance is written {}"}},
	{"mig-devices with MIG off", migHead + "  - {devices: all, mig-enabled: false, mig-devices: {1g.10gb: 1}}\n", []string{"f:4: mig-devices names instances while mig-enabled is false"}},
	{"mig-devices all zero", migHead + "  - {devices: all, mig-enabled: true, mig-devices: {1g.10gb: 0}}\n", []string{"f:4: all counts of mig-devices are 0: no instance is written {}"}},
	{"a negative count", migHead + "  - {devices: all, mig-enabled: true, mig-devices: {1g.10gb: -1}}\n", []string{"f:4: the count of \"1g.10gb\" is at least 0, not -1"}},
	{"one profile in two spellings", migHead + "  - {devices: all, mig-enabled: true, mig-devices: {1g.10gb: 1, 1c.1g.10gb: 1}}\n", []string{"f:4: 1g.10gb is already on line 4"}},
	{"mig-enabled as text", migHead + "  - {devices: all, mig-enabled: \"true\"}\n", []string{"f:4: mig-enabled is true or false, not the text \"true\""}},
	{"a UUID for the MIG manager", migHead + "  - {devices: [GPU-0a], mig-enabled: false}\n", []string{"f:4: an index is a whole number, not the text \"GPU-0a\""}},
	{"indices that assert lets through", migHead + "  - {devices: [0, 0, 99, -3], mig-enabled: false}\n", []string{
		"f:4: index 0 is in this list already, on line 4",
		"f:4: an index is at least 0, not -3"}},
	{"one index without a list", migHead + "  - {devices: 0, mig-enabled: false}\n", []string{"f:4: devices is all or a list of indices, not the number \"0\""}},
	{"a filter that is no id", migHead + "  - {device-filter: [A100], devices: all, mig-enabled: false}\n", []string{"f:4: device-filter \"A100\" is not a PCI id such as \"0x20B210DE\", or with the subsystem's \"0x20B210DE:0x147F10DE\""}},
	{"a filter with two subsystems", migHead + "  - {device-filter: '0x20B210DE:0x147F10DE:0x1', devices: all, mig-enabled: false}\n", []string{"f:4: device-filter \"0x20B210DE:0x147F10DE:0x1\" is not a PCI id such as \"0x20B210DE\", or with the subsystem's \"0x20B210DE:0x147F10DE\""}},
	{"a filter whose subsystem is empty", migHead + "  - {device-filter: ['0x20B210DE:'], devices: all, mig-enabled: false}\n", []string{"f:4: device-filter \"0x20B210DE:\" is not a PCI id such as \"0x20B210DE\", or with the subsystem's \"0x20B210DE:0x147F10DE\""}},
	{"a filter of nothing in a list", migHead + "  - {device-filter: [''], devices: all, mig-enabled: false}\n", []string{"f:4: device-filter \"\" is not a PCI id such as \"0x20B210DE\", or with the subsystem's \"0x20B210DE:0x147F10DE\""}},
	{"a filter without quotes", migHead + "  - {device-filter: 0x20B210DE, devices: all, mig-enabled: false}\n", []string{"f:4: device-filter is text, not the number \"0x20B210DE\""}},
	{"our keys in their file", migHead + "  - {devices: all, mode: off}\n", []string{
		"f:4: unknown key \"mode\": an item has device-filter, devices, mig-enabled and mig-devices",
		"f:4: the item has no mig-enabled: true or false"}},
	{"a config without items", "version: v1\nmig-configs:\n  a: []\n", []string{"f:3: partition \"a\" is an empty list"}},

	// All of them, in line order.
	{"several", "version: v1\npartitions:\n  a:\n  - {devices: [-1], mode: shared, replicas: 0}\n  b c:\n  - {mode: half}\nextra: 1\n", []string{
		"f:4: an index is at least 0, not -1",
		"f:4: replicas is at least 1, not 0",
		"f:5: the partition name \"b c\" has a character other than letters, digits, '-', '_' and '.': it is chosen by the value of a node label",
		"f:6: the entry has no devices: all, a list of indices or UUIDs, or {model: pattern}",
		"f:6: mode is whole, shared, mig, dynamic or off, not the text \"half\"",
		"f:7: unknown key \"extra\": a partition file has version, partitions and mig-configs"}},
	{"text that would break a message", head + "    - {devices: all, mode: \"a\\nb\\e[31m\"}\n", []string{"f:4: mode is whole, shared, mig, dynamic or off, not the text \"a\\nb\\x1b[31m\""}},
}

// bomb is nine lines that stand for 8^8 values.
func bomb() string {
	var b strings.Builder
	b.WriteString("version: v1\npartitions:\n  a: &a [1, 1, 1, 1, 1, 1, 1, 1]\n")
	for c := 'b'; c < 'i'; c++ {
		b.WriteString("  " + string(c) + ": &" + string(c) + " [" + strings.TrimSuffix(strings.Repeat("*"+string(c-1)+", ", 8), ", ") + "]\n")
	}
	return b.String()
}

func TestParseRefuses(t *testing.T) {
	seen := make(map[string]bool)
	for _, tc := range broken {
		t.Run(tc.name, func(t *testing.T) {
			if seen[tc.name] {
				t.Fatal("two cases have this name")
			}
			seen[tc.name] = true
			f, err := Parse("f", []byte(tc.in))
			if err == nil {
				t.Fatalf("it parses, with %q", f.Names())
			}
			if f != nil {
				t.Error("there is a File beside the error")
			}
			if diff := cmp.Diff(strings.Join(tc.want, "\n"), err.Error()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
			if all, ok := err.(Errors); !ok || all[0].File != "f" {
				t.Errorf("no Errors of the file f: %#v", err)
			}
		})
	}
}

// accepted is what strictness must not refuse.
var accepted = []struct{ name, in string }{
	{"a byte order mark", "\ufeff" + head + "    - {devices: all, mode: off}\n"},
	{"windows lines", strings.ReplaceAll(head+"    - {devices: all, mode: off}\n", "\n", "\r\n")},
	{"no newline at the end", head + "    - {devices: all, mode: off}"},
	{"JSON", `{"version": "v1", "partitions": {"a": [{"devices": "all", "mode": "shared", "replicas": 4}]}}`},
	{"a start and an end of the document", "---\n" + head + "    - {devices: all, mode: off}\n...\n"},
	{"aliases", head + "    - &all {devices: all, mode: off}\n  other:\n    - *all\n"},
	{"a merge", head + "    - &all {devices: all, mode: shared}\n  other:\n    - <<: *all\n      mode: off\n"},
	{"merges in a list", head + "    - &a {devices: all}\n    - &b {mode: off}\n  other:\n    - {<<: [*a, *b]}\n"},
	{"compute in each form", head + "    - {devices: [0], mode: shared, compute: timeslice, timeSlice: short}\n    - {devices: [1], mode: shared, compute: mps}\n    - {devices: [2], mode: shared, replicas: 48, compute: {mps: {}}}\n    - {devices: [3], mode: shared, compute: {mps: {factor: 0.5, max: 80}}}\n"},
	{"a geometry of nothing", head + "    - {devices: all, mode: mig, geometry: {}}\n"},
	{"a partition that is called off", "version: v1\npartitions:\n  off: [{devices: all, mode: off}]\n"},
	{"a name of 63 characters", "version: v1\npartitions:\n  " + strings.Repeat("x", 63) + ": [{devices: all, mode: off}]\n"},
	{"YAML 1.1 booleans of the MIG manager", migHead + "  - {devices: all, mig-enabled: no}\n"},
	{"a filter of one", migHead + "  - {device-filter: '0x20B210DE', devices: [], mig-enabled: false, mig-devices: {}}\n"},
	{"a filter of null", migHead + "  - {device-filter: null, devices: all, mig-enabled: false}\n"},
	{"filters of none, and with a subsystem", migHead + "  - {device-filter: '', devices: all, mig-enabled: false}\n  - {device-filter: [], devices: all, mig-enabled: false}\n  - {device-filter: ['0x20B210DE', '0x20B210DE:0x147F10DE'], devices: all, mig-enabled: false}\n"},
	{"counts of zero beside others, and of parts", migHead + "  - {devices: all, mig-enabled: true, mig-devices: {1g.10gb: 0, 1c.3g.40gb: 3, 3c.3g.40gb: 1}}\n"},
	{"a name that is no label, of the MIG manager", "version: v1\nmig-configs:\n  all 1g: [{devices: all, mig-enabled: false}]\n"},
	{"profiles in every form", head + "    - {devices: all, mode: mig, geometry: {1g.24gb+me.all: 1, 1g.24gb-me: 2, 4g.96gb+gfx: 1, 1c.3g.40gb: 3}}\n"},
}

func TestParseAccepts(t *testing.T) {
	for _, tc := range accepted {
		if tc.name == "merges in a list" {
			// The anchors' own entries are halves: only that they are the sole
			// mistakes shows that the merged entry is whole.
			_, err := Parse("f", []byte(tc.in))
			want := "f:4: the entry has no mode: whole, shared, mig, dynamic or off\n" +
				"f:5: the entry has no devices: all, a list of indices or UUIDs, or {model: pattern}"
			if err == nil || err.Error() != want {
				t.Errorf("%s: %v, want %s", tc.name, err, want)
			}
			continue
		}
		if _, err := Parse("f", []byte(tc.in)); err != nil {
			t.Errorf("%s: %v", tc.name, err)
		}
	}
}
