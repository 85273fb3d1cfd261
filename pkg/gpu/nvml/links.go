// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"slices"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"example.com/gpu-agent/pkg/gpu"
)

// A GPU's links are counted once, by number, up to the first number that is an invalid argument.
// The driver names a link's far end only while the link is up. linkReader asks for it when the
// link comes up, and keeps it by PCI address, so that it holds when indices change.
//
// Each inventory reads which links are up: all of a GPU's with one call for field values, as NCCL
// reads them on Hopper. That field (NVML_FI_DEV_NVLINK_GET_STATE) is used if it agreed with
// nvmlDeviceGetNvLinkState when the links were counted. Otherwise, and on drivers without the
// field, each link takes a call. A link that sleeps is up. So a reading of a GPU with NVLinks takes
// two calls more than one without: states and fabric. What cannot be read once stays as it was,
// since labels must not change back and forth while a driver is busy.
//
// The hardware at hand confirmed little of this: it has one GPU per machine, or none. The code
// relies on go-nvml's nvml.h and on public reports:
//
//   - nvmlDeviceGetNvLinkVersion returns an enumeration: 5 on an A100, which is NVLink 3.1
//     (open-mpi/hwloc issue 658).
//   - A link that a card has, but that is not connected, is down and no error: all 12 of an A100
//     PCIe (NVIDIA/DCGM issue 49). A number beyond the card's links is an invalid argument on GB200
//     (NVIDIA/TensorRT-LLM pull request 17060).
//   - Speeds are in MB/s (10^6 bytes), of one link in one direction, with the protocol's overhead:
//     25781 on V100, 25000 on A100, 26562 on H100, 53125 on GB200, as nvidia-smi nvlink -s prints.
//   - No report confirms what the state field is while a link is retrained, whether a GPU in MIG
//     mode shows its links (they are counted again when the mode changes), what the driver answers
//     for the far end of a link that is down, and the fabric of a GPU that a fabric manager moves
//     to another partition.
//
// On a machine with NVLink, tests/hardware compares the results with nvidia-smi topo -m.

// nvlinks is what is known of one GPU's NVLinks.
type nvlinks struct {
	// pci and mig are the GPU's PCI address and MIG mode when its links were counted. They are
	// counted again after a change: a driver may hide the links of a GPU in MIG mode.
	pci string
	mig bool
	// anew is true if the links must be counted again.
	anew bool
	// byField is true if one call can read the states of all links.
	byField bool
	// lanes are the GPU's links by number, up or down.
	lanes []lane
}

// lane is one NVLink of a GPU. Its far end is soldered or bolted. The driver names that only
// while the link is up, and lane remembers it.
type lane struct {
	number int
	up     bool
	// asked is true if the driver has named the far end since the link came up.
	asked    bool
	known    bool   // the far end is known
	switched bool   // the far end is an NVSwitch
	peer     string // otherwise: the PCI address of the GPU at the far end
	version  int    // NVLink generation; 0 if not known
	mbps     int    // MB/s in each direction; 0 if not known
}

// linkReader reads GPUs' NVLinks. It is used only while locks.calls is held.
type linkReader struct {
	*session
	known map[gpu.UUID]*nvlinks // of each GPU ever seen
	// counted is session.renewals when all links were last marked to be counted again.
	counted uint64
}

// recount marks all links to be counted again after a new initialisation, since cards may have
// been exchanged.
func (r *linkReader) recount() {
	now := r.renewals.Load()
	if now == r.counted {
		return
	}
	r.counted = now
	for _, own := range r.known {
		own.anew = true
	}
}

// lanesOf reads a GPU's NVLinks: the states each time, all else after a link has come up. What
// the driver cannot answer now stays as it was.
func (r *linkReader) lanesOf(h nvml.Device, dev *gpu.Device) *nvlinks {
	r.recount()
	own, ok := r.known[dev.UUID]
	if !ok {
		own = &nvlinks{anew: true}
		r.known[dev.UUID] = own
	}
	if own.anew || own.pci != dev.PCI || own.mig != dev.MIG.Enabled {
		r.countLanes(h, own)
		own.pci, own.mig = dev.PCI, dev.MIG.Enabled
	} else {
		r.readStates(h, own)
	}
	r.ask(h, own)
	return own
}

func (s *survey) LinksChanged(ctx context.Context) (changed bool, err error) {
	return call(ctx, s.session, "read the states of NVLinks", func() (bool, error) {
		changed := false
		s.links.recount()
		for u, own := range s.links.known {
			if len(own.lanes) == 0 || ctx.Err() != nil {
				continue
			}
			h, err := s.handle(u)
			if err != nil {
				continue
			}
			before, fabric := slices.Clone(own.lanes), s.last[u].Fabric
			s.links.readStates(h, own)
			now := s.links.fabric(h, fabric)
			same := now == fabric || now != nil && fabric != nil && *now == *fabric
			changed = changed || own.anew || !same || !slices.Equal(before, own.lanes)
		}
		return changed, nil
	})
}

// countLanes finds out which links a GPU has, by the call that all drivers have, and whether the
// state field can be used from now on.
func (r *linkReader) countLanes(h nvml.Device, own *nvlinks) {
	before := own.lanes
	own.lanes, own.anew, own.byField = nil, false, false
	for number := range nvml.NVLINK_MAX_LINKS {
		state, ret := h.GetNvLinkState(number)
		if ret == nvml.ERROR_INVALID_ARGUMENT {
			break // the card has fewer
		}
		told, err := nvmlDeviceGetNvLinkState.told("read the state of an NVLink", ret)
		if !told && err == nil {
			continue
		}
		l := lane{number: number}
		if at := slices.IndexFunc(before, func(b lane) bool { return b.number == number }); at >= 0 {
			l = before[at]
			l.asked = false
		}
		if told {
			l.up = state == nvml.FEATURE_ENABLED
		} else {
			own.anew = true
		}
		own.lanes = append(own.lanes, l)
	}
	if len(own.lanes) == 0 || own.anew {
		return
	}
	// The newer field should mean the same. It is used if all its states agree with the call's.
	// It alone distinguishes a link that sleeps from one that is down.
	states, ok := r.fields(h, nvml.FI_DEV_NVLINK_GET_STATE, own.lanes)
	if own.byField = ok && !slices.Contains(states, notGiven); !own.byField {
		return
	}
	for i, l := range own.lanes {
		if (states[i] == nvml.NVLINK_STATE_ACTIVE) != l.up && states[i] < nvml.NVLINK_STATE_SLEEP {
			own.byField = false
			return
		}
	}
	own.states(states)
}

// readStates reads which links are up. A link that cannot be read stays as it was.
func (r *linkReader) readStates(h nvml.Device, own *nvlinks) {
	if own.byField {
		if states, ok := r.fields(h, nvml.FI_DEV_NVLINK_GET_STATE, own.lanes); ok {
			own.states(states)
			return
		}
	}
	for i := range own.lanes {
		if state, ret := h.GetNvLinkState(own.lanes[i].number); ret == nvml.SUCCESS {
			own.lanes[i].set(state == nvml.FEATURE_ENABLED)
		}
	}
}

// states takes over the states from the field. A link that sleeps counts as up, since it wakes
// when there is data.
func (own *nvlinks) states(states []uint64) {
	for i, state := range states {
		if state != notGiven {
			own.lanes[i].set(state == nvml.NVLINK_STATE_ACTIVE || state == nvml.NVLINK_STATE_SLEEP)
		}
	}
}

func (l *lane) set(up bool) {
	l.asked = l.asked && up // its speed may change
	l.up = up
}

// ask reads far end, generation and speed of the links that have come up.
func (r *linkReader) ask(h nvml.Device, own *nvlinks) {
	fresh := slices.DeleteFunc(slices.Clone(own.lanes), func(l lane) bool { return !l.up || l.asked })
	if len(fresh) == 0 {
		return
	}
	typed, versioned := r.has(nvmlDeviceGetNvLinkRemoteDeviceType), r.has(nvmlDeviceGetNvLinkVersion)
	speeds := r.speeds(h, fresh)
	version := 0 // one call for all: a GPU's links are of one generation
	for i, f := range fresh {
		l := &own.lanes[slices.IndexFunc(own.lanes, func(l lane) bool { return l.number == f.number })]
		if speeds[i] != notGiven {
			l.mbps = int(speeds[i])
		}
		if versioned && version == 0 {
			v, ret := h.GetNvLinkVersion(l.number)
			if told, _ := nvmlDeviceGetNvLinkVersion.told("read the version of an NVLink", ret); told {
				version = generation(v)
			}
		}
		l.version = cmp.Or(version, l.version)
		if typed {
			kind, ret := h.GetNvLinkRemoteDeviceType(l.number)
			told, _ := nvmlDeviceGetNvLinkRemoteDeviceType.told("read what an NVLink leads to", ret)
			if told && kind == nvml.NVLINK_DEVICE_TYPE_SWITCH {
				l.switched, l.known, l.asked = true, true, true
				continue
			}
		}
		remote, ret := h.GetNvLinkRemotePciInfo(l.number)
		told, _ := nvmlDeviceGetNvLinkRemotePciInfo.told("read where an NVLink leads", ret)
		if told && busID(remote) != "" {
			l.peer, l.switched, l.known, l.asked = busID(remote), false, true, true
		}
	}
}

// speeds returns the speeds of links in each direction, in MB/s. Older drivers have no field for
// each link, but one for all that are up.
func (r *linkReader) speeds(h nvml.Device, lanes []lane) []uint64 {
	speeds, ok := r.fields(h, nvml.FI_DEV_NVLINK_GET_SPEED, lanes)
	if ok && !slices.Contains(speeds, notGiven) {
		return speeds
	}
	if common, ok := r.fields(h, nvml.FI_DEV_NVLINK_SPEED_MBPS_COMMON, lanes[:1]); ok {
		for i := range speeds {
			if speeds[i] == notGiven {
				speeds[i] = common[0]
			}
		}
	}
	return speeds
}

// notGiven marks a field value that the driver did not give.
const notGiven = ^uint64(0)

// fields reads one field of each link, all in one call. ok is true if the call succeeded; each
// field has a result of its own, and its value is notGiven if it failed.
func (r *linkReader) fields(h nvml.Device, id uint32, lanes []lane) (values []uint64, ok bool) {
	values = slices.Repeat([]uint64{notGiven}, len(lanes))
	if !r.has(nvmlDeviceGetFieldValues) {
		return values, false
	}
	asked := make([]nvml.FieldValue, len(lanes))
	for i, l := range lanes {
		asked[i] = nvml.FieldValue{FieldId: id, ScopeId: uint32(l.number)}
	}
	if h.GetFieldValues(asked) != nvml.SUCCESS {
		return values, false
	}
	for i, a := range asked {
		if nvml.Return(a.NvmlReturn) != nvml.SUCCESS {
			continue
		}
		switch nvml.ValueType(a.ValueType) {
		case nvml.VALUE_TYPE_UNSIGNED_INT:
			values[i] = uint64(binary.NativeEndian.Uint32(a.Value[:]))
		case nvml.VALUE_TYPE_UNSIGNED_LONG, nvml.VALUE_TYPE_UNSIGNED_LONG_LONG:
			values[i] = binary.NativeEndian.Uint64(a.Value[:])
		}
	}
	return values, true
}

// generation returns the major version of an NVLink version, or 0 if it is unknown. version is an
// enumeration, nvmlNvlinkVersion_t of nvml.h: an A100 answers 5, which is NVLink 3.1.
func generation(version uint32) int {
	switch nvml.NvlinkVersion(version) {
	case nvml.NVLINK_VERSION_1_0:
		return 1
	case nvml.NVLINK_VERSION_2_0, nvml.NVLINK_VERSION_2_2:
		return 2
	case nvml.NVLINK_VERSION_3_0, nvml.NVLINK_VERSION_3_1:
		return 3
	case nvml.NVLINK_VERSION_4_0:
		return 4
	case nvml.NVLINK_VERSION_5_0:
		return 5
	case nvml.NVLINK_VERSION_6_0:
		return 6
	}
	return 0
}

// joined returns the links that are up, as an inventory lists them: added up by peer, in the
// order of the peers' indices, switches last. It leaves out links whose far end was never known,
// or is no GPU of this inventory (a processor, a GPU of another virtual machine).
func (own *nvlinks) joined(self int, gpus []gpu.Device) []gpu.Link {
	type sum struct {
		gpu.Link
		told, total int // how many lanes have a known speed, and the sum of these
	}
	var sums []*sum
	for _, l := range own.lanes {
		if !l.up || !l.known {
			continue
		}
		end := gpu.Link{Switch: l.switched}
		if !l.switched {
			at := slices.IndexFunc(gpus, func(g gpu.Device) bool { return !g.Gone && g.PCI == l.peer })
			if at < 0 || at == self {
				continue
			}
			end.To = gpus[at].Index
		}
		at := slices.IndexFunc(sums, func(s *sum) bool { return s.To == end.To && s.Switch == end.Switch })
		if at < 0 {
			at = len(sums)
			sums = append(sums, &sum{Link: end})
		}
		s := sums[at]
		s.NVLink++
		// Lanes of different generations count as the lowest.
		if s.Version == 0 || l.version > 0 && l.version < s.Version {
			s.Version = l.version
		}
		if l.mbps > 0 {
			s.told, s.total = s.told+1, s.total+l.mbps
		}
	}
	slices.SortFunc(sums, func(a, b *sum) int {
		if a.Switch != b.Switch {
			if a.Switch {
				return 1
			}
			return -1
		}
		return cmp.Compare(a.To, b.To)
	})
	var links []gpu.Link
	for _, s := range sums {
		if s.told > 0 {
			s.LaneMBps = s.total / s.told
		}
		links = append(links, s.Link)
	}
	return links
}

// fabric returns the NVLink fabric beyond the node that a GPU belongs to, or nil if there is
// none. A machine of 8 GPUs with its own switches reports the UUID zero, which is no fabric. If
// the driver cannot answer now, fabric returns before.
func (r *linkReader) fabric(h nvml.Device, before *gpu.Fabric) *gpu.Fabric {
	info, told, err := r.fabricInfo(h)
	switch {
	case err != nil:
		return before
	case !told:
		return nil
	case info.state != nvml.GPU_FABRIC_STATE_COMPLETED || info.status != nvml.SUCCESS || info.cluster == [16]uint8{}:
		return nil
	}
	x := hex.EncodeToString(info.cluster[:])
	id := fmt.Sprintf("%s-%s-%s-%s-%s", x[:8], x[8:12], x[12:16], x[16:20], x[20:])
	return &gpu.Fabric{Cluster: id, Clique: info.clique}
}

// fabricInfo is what the driver reports of a GPU's NVLink fabric.
type fabricInfo struct {
	state   uint8
	status  nvml.Return
	clique  uint32
	cluster [16]uint8
}

// fabricInfo reads it. told is false if the driver does not support it.
func (s *session) fabricInfo(h nvml.Device) (f fabricInfo, told bool, err error) {
	const what = "read the NVLink fabric"
	switch {
	case s.has(nvmlDeviceGetGpuFabricInfoV): // its first version is V2
		info, ret := h.GetGpuFabricInfoV().V2()
		told, err = nvmlDeviceGetGpuFabricInfoV.told(what, ret)
		f = fabricInfo{info.State, nvml.Return(info.Status), info.CliqueId, info.ClusterUuid}
	case s.has(nvmlDeviceGetGpuFabricInfo):
		info, ret := h.GetGpuFabricInfo()
		told, err = nvmlDeviceGetGpuFabricInfo.told(what, ret)
		f = fabricInfo{info.State, nvml.Return(info.Status), info.CliqueId, info.ClusterUuid}
	}
	return f, told, err
}
