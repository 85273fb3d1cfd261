// SPDX-License-Identifier: Apache-2.0

package emulator

// Level is how far apart two GPUs are on the PCI bus, with the numbers of
// nvmlGpuTopologyLevel_t.
type Level uint32

// The levels that the world has.
const (
	LevelSame   Level = 0  // one board
	LevelSwitch Level = 10 // one PCIe switch
	LevelNode   Level = 40 // one NUMA node
	LevelSystem Level = 50
)

// CommonAncestor is the nearest thing on the PCI bus that two GPUs share. Two
// neighbours stand behind one switch, as on most boards.
func (s *Session) CommonAncestor(a, b Handle) (Level, Return) {
	return device(s, "nvmlDeviceGetTopologyCommonAncestor", a, func(g *gpu) (Level, Return) {
		other, r := s.gpuLocked(b)
		if r != Success {
			return 0, r
		}
		return level(g, other), Success
	})
}

func level(a, b *gpu) Level {
	switch {
	case a == b:
		return LevelSame
	case a.numa != b.numa:
		return LevelSystem
	case a.slot/2 == b.slot/2:
		return LevelSwitch
	}
	return LevelNode
}

// NearestGPUs lists the GPUs at one level from a GPU, without itself.
func (s *Session) NearestGPUs(h Handle, l Level) ([]Handle, Return) {
	return device(s, "nvmlDeviceGetTopologyNearestGpus", h, func(g *gpu) ([]Handle, Return) {
		var out []Handle
		for _, other := range s.p.gpus {
			if other != g && level(g, other) == l {
				out = append(out, Handle(other.slot))
			}
		}
		return out, Success
	})
}

// maxNVLinks is NVML_NVLINK_MAX_LINKS: a link beyond it is an invalid argument,
// one below it that the GPU lacks is not supported.
const maxNVLinks = 36

// Link is what stands at the far end of one of a GPU's NVLinks.
type Link struct {
	Active bool
	Switch bool // an NVSwitch, else a GPU
	Remote PCI
}

// NVLink describes one of a GPU's links. A link without a far end is not
// active.
func (s *Session) NVLink(h Handle, link int) (Link, Return) {
	return device(s, "nvmlDeviceGetNvLinkState", h, func(g *gpu) (Link, Return) {
		switch {
		case link < 0 || link >= maxNVLinks:
			return Link{}, InvalidArgument
		case link >= g.NVLinks:
			return Link{}, NotSupported
		}
		return s.p.w.linkLocked(g, link), Success
	})
}

// nvswitchDevice is the PCI identity of the NVSwitch of Ampere and Hopper
// boards.
const nvswitchDevice = 0x22A310DE

func (w *World) linkLocked(g *gpu, link int) Link {
	var peers []*gpu
	for _, other := range w.gpus {
		if other != g && !other.unplugged && other.NVLinks > 0 {
			peers = append(peers, other)
		}
	}
	if len(peers) == 0 {
		return Link{}
	}
	switch {
	case w.nvlink == "mesh":
		// Whole rounds only, so that both ends of a link know each other.
		if link >= g.NVLinks/len(peers)*len(peers) {
			return Link{}
		}
		return Link{Active: true, Remote: peers[link%len(peers)].pci}
	case w.nvlink == "none" || g.NVSwitches == 0:
		return Link{}
	}
	at := PCI{Bus: 0x05, Device: uint32(link % g.NVSwitches), DeviceID: nvswitchDevice}
	return Link{Active: true, Switch: true, Remote: at}
}
