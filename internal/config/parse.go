// SPDX-License-Identifier: Apache-2.0

package config

import (
	"math"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"

	"go.yaml.in/yaml/v4"
)

// Version is the only version of the schema so far. Ours and NVIDIA's have the same.
const Version = "v1"

// maxLabel is how many characters the value of a Kubernetes label may have.
const maxLabel = 63

// Parse reads a partition file, or one written for NVIDIA's MIG manager. Messages begin with
// name. The error is an Errors with all mistakes found; the File is then nil.
func Parse(name string, data []byte) (*File, error) {
	p := &parser{mistakes{file: name}}
	f := &File{name: name, line: 1}
	if root := document(&p.mistakes, data); root != nil {
		p.file(f, root)
	}
	if err := p.err(); err != nil {
		return nil, err
	}
	return f, nil
}

type parser struct{ mistakes }

func (p *parser) file(f *File, root *yaml.Node) {
	const (
		version = "version"
		ours    = "partitions"
		theirs  = "mig-configs"
	)
	if isManifest(root) {
		p.at(root,
			"this is a Kubernetes manifest: a partition file is the content of its data's key "+ManifestKey)
		return
	}
	if isDevicePlugins(root) {
		p.at(root, "this is a configuration of NVIDIA's device plugin: `gpu-agent check --config` says what it becomes here")
		return
	}
	keys, ok := p.fields(root, "a partition file", version, ours, theirs)
	if !ok {
		return
	}
	if v, ok := keys[version]; !ok {
		p.at(root, "the version is missing: this program knows `version: %s`", Version)
	} else if v.Kind != yaml.ScalarNode || v.Value != Version {
		// In another version anything may differ: further mistakes would be noise.
		p.at(v, "the version is %s: this program knows %s", kind(v), Version)
		return
	}
	o, isOurs := keys[ours]
	t, isTheirs := keys[theirs]
	switch {
	case isOurs && isTheirs:
		p.at(t, "a file has %s or, for NVIDIA's MIG manager, %s, not both", ours, theirs)
	case isOurs:
		p.partitions(f, o, "partitions", p.entry)
	case isTheirs:
		f.nvidia = true
		p.partitions(f, t, "mig-configs", p.item)
	default:
		p.at(root, "the file has no partitions: they belong under `%s:`", ours)
	}
}

// isManifest reports whether the file is a whole ConfigMap instead of its content.
func isManifest(root *yaml.Node) bool {
	if root.Kind != yaml.MappingNode {
		return false
	}
	found := 0
	for i := 0; i < len(root.Content); i += 2 {
		if k := root.Content[i].Value; k == "apiVersion" || k == "kind" {
			found++
		}
	}
	return found == 2
}

func (p *parser) partitions(f *File, n *yaml.Node, what string, read func(*yaml.Node) (entry, bool)) {
	f.line = n.Line
	named, ok := p.pairs(n, what)
	if ok && len(n.Content) == 0 {
		p.at(n, "%s is empty: it needs at least one name with a list of entries", what)
	}
	for _, pair := range named {
		part := partition{name: pair.key.Value, line: pair.key.Line}
		if reason := badLabel(part.name); reason != "" && !f.nvidia {
			p.at(pair.key, "the partition name %s %s: it is chosen by the value of a node label",
				quote(part.name), reason)
		}
		nodes, _ := p.items(pair.value, "partition "+quote(part.name))
		for _, node := range nodes {
			if e, ok := read(node); ok {
				e.want.Line = e.line
				part.entries = append(part.entries, e)
			}
		}
		f.partitions = append(f.partitions, part)
	}
}

// badLabel returns why a name cannot be the value of a label; empty if it can. The names in a
// MIG manager's file need not be labels: such a file is accepted as the MIG manager accepts it,
// and a name that is no label is never chosen.
func badLabel(s string) string {
	alnum := func(c byte) bool {
		return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
	}
	switch {
	case s == "":
		return "is empty"
	case len(s) > maxLabel:
		return "is longer than 63 characters"
	case !alnum(s[0]) || !alnum(s[len(s)-1]):
		return "does not begin and end with a letter or digit"
	}
	for i := range len(s) {
		if c := s[i]; !alnum(c) && c != '-' && c != '_' && c != '.' {
			return "has a character other than letters, digits, '-', '_' and '.'"
		}
	}
	return ""
}

// entry reads one item of a partition.
func (p *parser) entry(n *yaml.Node) (entry, bool) {
	e := entry{line: n.Line}
	keys, ok := p.fields(n, "an entry",
		"devices", "mode", "api", "replicas", "timeSlice", "compute", "spot", "lend", "geometry", "profiles")
	if !ok {
		return e, false
	}
	if d, ok := keys["devices"]; ok {
		p.devices(&e.devices, d)
	} else {
		p.at(n, "the entry has no devices: all, a list of indices or UUIDs, or {model: pattern}")
	}
	mode, known := keys["mode"]
	if !known {
		p.at(n, "the entry has no mode: whole, shared, mig, dynamic or off")
	} else {
		e.want.Mode, known = choice(&p.mistakes, mode, "mode", Whole, Shared, MIG, Dynamic, Off)
	}

	if a, ok := keys["api"]; ok {
		e.want.API, _ = choice(&p.mistakes, a, "api", ledger.DevicePlugin, ledger.DRA)
		if e.apiLine = a.Line; known && e.want.Mode == Off {
			p.at(a, "api is for a GPU that is offered: this entry is %s", Off)
		}
	}

	// Keys are read in every mode, so that a key in the wrong place is also checked for its own
	// mistakes.
	if e.want.Mode == Shared {
		e.want.TimeSlice = gpu.TimeSliceDefault
	}
	replicas, inReplicas := p.only(keys, "replicas", e.want.Mode, known, Shared)
	if inReplicas {
		e.want.Replicas, _ = p.number(replicas, "replicas", 1, timeslice.MaxDevices)
	}
	slice, sliced := p.only(keys, "timeSlice", e.want.Mode, known, Shared)
	if sliced {
		e.want.TimeSlice, _ = choice(&p.mistakes, slice, "timeSlice",
			gpu.TimeSliceDefault, gpu.TimeSliceShort, gpu.TimeSliceMedium, gpu.TimeSliceLong)
	}
	if c, ok := p.only(keys, "compute", e.want.Mode, known, Shared); ok {
		e.want.Compute, e.computeLine = p.sharing(c), c.Line
		if e.want.Compute.MPS && sliced && e.want.Mode == Shared {
			p.at(slice, "timeSlice is for containers that take turns, and with compute mps they run at the same time: "+
				"leave out one of the two")
		}
		if e.want.Compute.MPS && e.want.Replicas > compute.MostClients {
			p.at(replicas, "replicas is at most %d with compute mps, not %d: an MPS server accepts %d processes",
				compute.MostClients, e.want.Replicas, compute.MostClients)
		}
	}
	if n, ok := p.only(keys, "spot", e.want.Mode, known, Whole, Shared, MIG); ok {
		e.want.Spot, e.spotLine = p.spot(n, e.want.Mode), n.Line
		if e.want.Spot.On && inReplicas {
			p.at(n, "spot is for whole GPUs, units of memory and MIG instances, and this entry has replicas: leave out one of the two")
		}
	}
	if n, ok := p.only(keys, "lend", e.want.Mode, known, Whole, Shared, MIG); ok {
		after := p.lend(n)
		if _, offers := keys["spot"]; !offers || keys["spot"].Kind == yaml.ScalarNode && !e.want.Spot.On {
			p.at(n, "lend gives idle room to spot pods, and this entry offers them none: add spot: true, or leave out lend")
		} else if e.want.Spot.On {
			e.want.Spot.Lend = after
		}
	}
	g, fixed := p.only(keys, "geometry", e.want.Mode, known, MIG)
	if fixed {
		e.want.Geometry = p.geometry(g, "geometry", 1, nil)
	}
	if pr, ok := p.only(keys, "profiles", e.want.Mode, known, MIG, Dynamic); ok {
		e.want.Profiles = p.profiles(pr)
		if fixed {
			p.at(pr, "profiles limits MIG on demand, and geometry is fixed: an entry has one of the two")
		}
	}
	e.want.OnDemand = e.want.Mode == MIG && !fixed || e.want.Mode == Dynamic
	return e, true
}

// The words of compute.
const (
	takeTurns = "timeslice"
	throughIt = "mps"
)

// sharing reads compute: a word, or {mps: {factor: …, max: …}}.
func (p *parser) sharing(n *yaml.Node) (s compute.Sharing) {
	if n.Kind != yaml.MappingNode {
		if n.Kind == yaml.ScalarNode && n.ShortTag() == "!!str" && (n.Value == takeTurns || n.Value == throughIt) {
			s.MPS = n.Value == throughIt
		} else {
			p.at(n, "compute is timeslice, mps or {mps: {factor: …, max: …}}, not %s", kind(n))
		}
		return s
	}
	keys, ok := p.fields(n, "compute", throughIt)
	if !ok {
		return s
	}
	m, ok := keys[throughIt]
	if !ok {
		p.at(n, "compute is a mapping without mps: write {mps: {factor: …, max: …}}, mps, or timeslice")
		return s
	}
	if keys, ok = p.fields(m, throughIt, "factor", "max"); !ok {
		return s
	}
	s.MPS = true
	if f, ok := keys["factor"]; ok {
		s.Factor, _ = p.decimal(f, "factor", compute.LeastFactor, compute.MostFactor)
	}
	if most, ok := keys["max"]; ok {
		s.Max, _ = p.number(most, "max", 1, 100)
	}
	return s.Normal()
}

// spot reads spot: true, false, or {most: …}.
func (p *parser) spot(n *yaml.Node, mode Mode) (o ledger.Offering) {
	if n.Kind == yaml.ScalarNode && n.ShortTag() == "!!bool" {
		_ = n.Decode(&o.On) // a bool by its tag
		return o
	}
	if n.Kind != yaml.MappingNode {
		p.at(n, "spot is true, false or {most: …}, not %s", kind(n))
		return o
	}
	keys, ok := p.fields(n, "spot", "most")
	if !ok {
		return o
	}
	most, ok := keys["most"]
	switch {
	case !ok:
		p.at(n, "spot is a mapping without most: write {most: …}, true, or false")
	case mode != Shared:
		p.at(most, "most counts the units of a GPU's memory: this entry is %s, so write spot: true", mode)
	default:
		o.On = true
		o.Most, _ = p.number(most, "most", 1, timeslice.MaxDevices)
	}
	return o
}

// SpotText writes the value of spot as a partition file has it; empty if the room is not offered.
func SpotText(o ledger.Offering) string {
	switch {
	case !o.On:
		return ""
	case o.Most == 0:
		return "true"
	}
	return "{most: " + strconv.Itoa(o.Most) + "}"
}

// leastIdle and mostIdle bound how long a holder must have been idle before it lends. Below a minute a program
// that starts would often find its room lent. A year is as good as never.
const (
	leastIdle = time.Minute
	mostIdle  = 365 * 24 * time.Hour
)

// lend reads lend: {after: …}. It returns 0 after a mistake.
func (p *parser) lend(n *yaml.Node) time.Duration {
	if n.Kind != yaml.MappingNode {
		p.at(n, "lend is {after: …}, how long a holder must have been idle, not %s", kind(n))
		return 0
	}
	keys, ok := p.fields(n, "lend", "after")
	if !ok {
		return 0
	}
	after, ok := keys["after"]
	if !ok {
		p.at(n, "lend has no after: write {after: 15m}, how long a holder must have been idle")
		return 0
	}
	text := after.Value
	if after.Kind != yaml.ScalarNode || after.ShortTag() != "!!str" {
		text = ""
	}
	idle, err := time.ParseDuration(text)
	switch {
	case err != nil:
		p.at(after, "after is a duration such as 15m or 2h, not %s", kind(after))
	case idle < leastIdle || idle > mostIdle:
		p.at(after, "after is from 1m to %.0fh, not %s", mostIdle.Hours(), quote(text))
	default:
		return idle
	}
	return 0
}

// LendText writes the value of lend as a partition file has it; empty if no room is lent.
func LendText(o ledger.Offering) string {
	if !o.On || o.Lend == 0 {
		return ""
	}
	text := o.Lend.String() // 15m0s, 2h0m0s
	for _, zero := range []string{"m0s", "h0m"} {
		if short, ok := strings.CutSuffix(text, zero); ok {
			text = short + zero[:1]
		}
	}
	return "{after: " + text + "}"
}

// ComputeText writes the value of compute as a partition file has it.
func ComputeText(s compute.Sharing) string {
	var of []string
	if s = s.Normal(); s.Factor != 0 {
		of = append(of, "factor: "+strconv.FormatFloat(s.Factor, 'f', -1, 64))
	}
	if s.Max != 0 {
		of = append(of, "max: "+strconv.Itoa(s.Max))
	}
	switch {
	case !s.MPS:
		return takeTurns
	case len(of) == 0:
		return throughIt
	}
	return "{" + throughIt + ": {" + strings.Join(of, ", ") + "}}"
}

// only returns a key's value. It adds a mistake if the key does not belong to the entry's mode.
func (p *parser) only(keys map[string]*yaml.Node, key string, mode Mode, known bool, of ...Mode) (*yaml.Node, bool) {
	n, ok := keys[key]
	if ok && known && !slices.Contains(of, mode) {
		var words []string
		for _, m := range of {
			words = append(words, string(m))
		}
		p.at(n, "%s belongs to mode %s: this entry is %s", key, list(words, "or"), mode)
	}
	return n, ok
}

func (p *parser) devices(s *selector, n *yaml.Node) {
	switch {
	case n.Kind == yaml.MappingNode:
		keys, _ := p.fields(n, "devices", "model")
		m, ok := keys["model"]
		if !ok {
			p.at(n, "devices has no model: {model: pattern}")
			return
		}
		if s.model, ok = p.text(m, "model"); !ok {
			return
		}
		if s.model == "" {
			p.at(m, "model is an empty pattern, which matches no GPU")
		} else if _, err := path.Match(s.model, ""); err != nil {
			p.at(m, "model %s is not a pattern: a [ is not closed, or a \\ is at the end", quote(s.model))
		}
	case n.Kind == yaml.SequenceNode:
		p.deviceList(s, n)
	case n.ShortTag() == "!!str" && n.Value == "all":
		s.all = true
	default:
		p.at(n, "devices is all, a list of indices or UUIDs, or {model: pattern}, not %s", kind(n))
	}
}

// Reasons for the bounds of lists.
const (
	noSuchNode = "no node has so many GPUs: name those of a node, or all"
	noSuchGPU  = "no GPU has so many MIG profiles: name those of a model"
)

// deviceList reads indexes or UUIDs. A list of both is refused, since it could name one GPU
// twice unnoticed.
func (p *parser) deviceList(s *selector, n *yaml.Node) {
	nodes, _ := p.itemsUpTo(n, "devices", mostGPUs, noSuchNode)
	indexLine, uuidLine := make(map[int]int), make(map[gpu.UUID]int)
	for _, c := range nodes {
		if c.Kind == yaml.ScalarNode && c.ShortTag() == "!!str" {
			if reason := badUUID(c.Value); reason != "" {
				p.at(c, "%s is neither the index nor the UUID of a GPU: %s", quote(c.Value), reason)
				continue
			}
			u := gpu.UUID(c.Value)
			if line, again := uuidLine[u]; again {
				p.at(c, "%s is in this list already, on line %d", u, line)
				continue
			}
			uuidLine[u] = c.Line
			s.uuids = append(s.uuids, uuidAt{u, c.Line})
		} else {
			p.index(s, c, indexLine)
		}
	}
	if len(s.indices) > 0 && len(s.uuids) > 0 {
		p.at(n, "the list mixes indices and UUIDs: use one of the two")
	}
}

// index reads an index that is not in the list yet. lines has the lines of the others.
func (p *parser) index(s *selector, n *yaml.Node, lines map[int]int) {
	x, ok := p.number(n, "an index", 0, math.MaxInt32)
	if !ok {
		return
	}
	if line, again := lines[x]; again {
		p.at(n, "index %d is in this list already, on line %d", x, line)
		return
	}
	lines[x] = n.Line
	s.indices = append(s.indices, indexAt{x, n.Line})
}

func badUUID(s string) string {
	rest, ok := strings.CutPrefix(s, "GPU-")
	switch {
	case strings.HasPrefix(s, "MIG-"):
		return "a partition lays out GPUs, and this names a MIG instance"
	case !ok:
		return `a UUID begins with "GPU-", an index has no quotes`
	case rest == "" || strings.Trim(rest, "0123456789abcdefABCDEF-") != "":
		return `after "GPU-" come hexadecimal digits and dashes`
	}
	return ""
}

// geometry reads profiles with their counts, each at least low. spell, if it is not nil,
// changes the spelling of a name before it is parsed.
func (p *parser) geometry(n *yaml.Node, what string, low int, spell func(string) string) []mig.Count {
	if p.tooMany(n, what, len(n.Content)/2, mostProfiles, noSuchGPU) {
		return nil
	}
	ps, _ := p.pairs(n, what)
	counts := make([]mig.Count, 0, len(ps))
	lines := make(map[mig.Name]int)
	for _, pair := range ps {
		name := pair.key.Value
		if spell != nil {
			name = spell(name)
		}
		prof, err := mig.Parse(name)
		if err != nil {
			p.at(pair.key, "%v", err)
		} else if line, again := lines[prof]; again {
			p.at(pair.key, "%s is already on line %d", prof, line)
		} else {
			lines[prof] = pair.key.Line
		}
		c, ok := p.number(pair.value, "the count of "+quote(pair.key.Value), low, timeslice.MaxDevices)
		if ok && err == nil && c > 0 {
			counts = append(counts, mig.Count{Profile: prof, N: c})
		}
	}
	slices.SortFunc(counts, func(a, b mig.Count) int { return mig.Compare(a.Profile, b.Profile) })
	return counts
}

func (p *parser) profiles(n *yaml.Node) []mig.Name {
	nodes, _ := p.itemsUpTo(n, "profiles", mostProfiles, noSuchGPU)
	var names []mig.Name
	lines := make(map[mig.Name]int)
	for _, c := range nodes {
		s, ok := p.text(c, "a profile")
		if !ok {
			continue
		}
		prof, err := mig.Parse(s)
		switch line, again := lines[prof]; {
		case err != nil:
			p.at(c, "%v", err)
		case again:
			p.at(c, "%s is in this list already, on line %d", prof, line)
		case prof.Compute != 0:
			p.at(c, "%s is a part of an instance, which is not made on demand: name %s, or write a geometry",
				prof, prof.GPUInstance())
		default:
			lines[prof] = c.Line
			names = append(names, prof)
		}
	}
	slices.SortFunc(names, mig.Compare)
	return names
}
