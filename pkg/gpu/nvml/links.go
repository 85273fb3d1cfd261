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

// nvlinks is what is known of one GPU's NVLinks.
type nvlinks struct {
	// pci and mig are the GPU's address and MIG mode when its links were counted: a
	// driver may hide links of a GPU in MIG mode.
	pci string
	mig bool
	// anew asks for another count.
	anew bool
	// byField says that the states can be read all in one call.
	byField bool
	// lanes are the GPU's links in the order of their numbers, up or down.
	lanes []lane
}

// lane is one NVLink of a GPU. Where it leads is soldered or bolted: the driver
// tells it only while the link is up, and what it told is kept.
type lane struct {
	number int
	up     bool
	// asked says that the driver has told where the link leads since it came up.
	asked    bool
	known    bool   // where it leads
	switched bool   // it leads to an NVSwitch
	peer     string // otherwise: the PCI address of the GPU that it leads to
	version  int    // NVLink generation, 0 where not known
	mbps     int    // in each direction, 0 where not known
}

// linkReader reads GPUs' NVLinks. It is used inside the door only.
type linkReader struct {
	*session
	known map[gpu.UUID]*nvlinks // of each GPU ever seen
	// counted is session.renewals when the links were last marked to be counted again.
	counted uint64
}

// recount has the links counted again where the driver was initialised anew: cards may have
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

// lanesOf reads a GPU's NVLinks: their states each time, all else when a link
// has come up. What the driver cannot tell now stays as it was.
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

// countLanes finds out which links a GPU has, with the call that every driver
// knows, and whether their states can be read by field from now on.
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
	// The field is newer and means the same; it is used where it says the
	// same. It alone tells a link that sleeps from one that is down.
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

// readStates reads which links are up.
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

// states takes the states that field values gave. A link that sleeps wakes when
// there is something to carry.
func (own *nvlinks) states(states []uint64) {
	for i, state := range states {
		if state != notGiven {
			own.lanes[i].set(state == nvml.NVLINK_STATE_ACTIVE || state == nvml.NVLINK_STATE_SLEEP)
		}
	}
}

func (l *lane) set(up bool) {
	l.asked = l.asked && up // it may come back slower
	l.up = up
}

// ask finds out where links lead that came up.
func (r *linkReader) ask(h nvml.Device, own *nvlinks) {
	fresh := slices.DeleteFunc(slices.Clone(own.lanes), func(l lane) bool { return !l.up || l.asked })
	if len(fresh) == 0 {
		return
	}
	typed, versioned := r.has(nvmlDeviceGetNvLinkRemoteDeviceType), r.has(nvmlDeviceGetNvLinkVersion)
	speeds := r.speeds(h, fresh)
	version := 0 // of all: a GPU's links are of one generation
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

// speeds is what links carry in each direction, in MB/s; before the field of each
// link there was one for all that are up.
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

// notGiven stands for a field value that the driver did not give.
const notGiven = ^uint64(0)

// fields reads one field of each link, all in one call. Each has its own outcome;
// ok says that the call as a whole succeeded.
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

// generation is the first number of an NVLink version. The driver gives an
// enumeration, nvmlNvlinkVersion_t of nvml.h: an A100 says 5, which is NVLink 3.1.
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

// joined puts the links that are up in the words of an inventory: by the peers'
// indices, switches last. A link to what is no GPU of this inventory (a
// processor, a GPU of another guest of the machine) is left out, as is one whose
// end was never told.
func (own *nvlinks) joined(self int, gpus []gpu.Device) []gpu.Link {
	type sum struct {
		gpu.Link
		told, total int // lanes whose speed is known, and their speeds' sum
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
		// Lanes that are trained as different generations are as good as the least.
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

// fabric reads which NVLink fabric beyond the node a GPU belongs to, nil if it belongs
// to none. An 8-GPU machine with switches of its own reports the UUID zero, which is no
// fabric. If the driver cannot tell now, the answer is the one before.
func (r *linkReader) fabric(h nvml.Device, before *gpu.Fabric) *gpu.Fabric {
	var state uint8
	var status, clique uint32
	var cluster [16]uint8
	var told bool
	var err error
	const what = "read the NVLink fabric"
	switch {
	case r.has(nvmlDeviceGetGpuFabricInfoV): // the first one has the number 2
		info, ret := h.GetGpuFabricInfoV().V2()
		told, err = nvmlDeviceGetGpuFabricInfoV.told(what, ret)
		state, status, clique, cluster = info.State, info.Status, info.CliqueId, info.ClusterUuid
	case r.has(nvmlDeviceGetGpuFabricInfo):
		info, ret := h.GetGpuFabricInfo()
		told, err = nvmlDeviceGetGpuFabricInfo.told(what, ret)
		state, status, clique, cluster = info.State, info.Status, info.CliqueId, info.ClusterUuid
	default:
		return nil
	}
	switch {
	case err != nil:
		return before
	case !told:
		return nil
	case state != nvml.GPU_FABRIC_STATE_COMPLETED || nvml.Return(status) != nvml.SUCCESS || cluster == [16]uint8{}:
		return nil
	}
	x := hex.EncodeToString(cluster[:])
	id := fmt.Sprintf("%s-%s-%s-%s-%s", x[:8], x[8:12], x[12:16], x[16:20], x[20:])
	return &gpu.Fabric{Cluster: id, Clique: clique}
}
