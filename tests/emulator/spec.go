// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v4"
)

// MaxGPUs is the most GPUs a world holds, as many as the largest machines of
// the field have on one node.
const MaxGPUs = 16

// Spec describes a node's GPUs, as it stands in a world's YAML file.
type Spec struct {
	// Driver is the driver's version, three numbers. Default 580.159.03.
	Driver string `yaml:"driver"`
	// CUDA is the newest CUDA version that the driver serves. Default 13.0.
	CUDA string `yaml:"cuda"`
	// Dmem says that the machine's kernel has the dmem controller (6.14 and later), by
	// which driver 615 and later limit cgroups. Default: it has not, and the driver
	// keeps limits of its own.
	Dmem bool `yaml:"dmem"`
	// Seed decides the UUIDs and serials: two nodes want two seeds, and one
	// seed always gives the same node. Default "gpu".
	Seed string `yaml:"seed"`
	// Model names one of Models, for all GPUs that do not name their own.
	Model string `yaml:"model"`
	// Count is how many GPUs there are, 1 to MaxGPUs. Default 8.
	Count int `yaml:"count"`
	// Minors is "reversed" (default: the minor of the first GPU is the
	// highest, so that whoever takes an index for a minor is found out) or
	// "same".
	Minors string `yaml:"minors"`
	// Topology names one of Topologies, a world that stands underneath this one: what
	// is written besides wins. Without one, GPUs are spread over the board in twos, and
	// the second half is on a NUMA node of its own.
	Topology string `yaml:"topology"`
	// Machine and Vendor are what the firmware calls the machine and its maker.
	Machine string `yaml:"machine"`
	Vendor  string `yaml:"vendor"`
	// NUMA is the machine's nodes, in the order of their numbers. Default: as many as
	// the GPUs name, of 64 CPUs each.
	NUMA []NUMASpec `yaml:"numa"`
	// NVLink is "switch" (every link ends at an NVSwitch), "mesh" (links run
	// between all GPUs), "pairs" (between each two), "cube" (the hybrid cube mesh of a
	// DGX-1), "none", or empty: switch on two or more GPUs of a model whose boards have
	// NVSwitches, else none.
	NVLink string `yaml:"nvlink"`
	// Links says it link by link instead.
	Links []LinkSpec `yaml:"links"`
	// Switches are the NVSwitches' paths, as in GPUSpec. Present and empty: they are not
	// on this machine's bus, as in virtual machines. Default: somewhere.
	Switches []string `yaml:"switches"`
	// NICs is the machine's RDMA network cards.
	NICs []NICSpec `yaml:"nics"`
	// Fabric is absent where no fabric manager speaks to the driver.
	Fabric *FabricSpec `yaml:"fabric"`
	// ContextMiB is what a CUDA context takes on a GPU; 0 is what the model has.
	ContextMiB uint64 `yaml:"contextMiB"`
	// MIG says how the driver deals with it.
	MIG MIGSpec `yaml:"mig"`
	// NotSupported are calls that the driver answers NotSupported: exported names, or
	// patterns of path.Match such as nvmlEventSet*.
	NotSupported []string `yaml:"notSupported"`
	// GPUs overrides single GPUs.
	GPUs []GPUSpec `yaml:"gpus"`
}

// GPUSpec overrides one GPU of a Spec. What is absent stays as the model and
// the Spec have it.
type GPUSpec struct {
	Index int    `yaml:"index"`
	Model string `yaml:"model"`
	UUID  string `yaml:"uuid"`
	Minor *int   `yaml:"minor"`
	PCI   string `yaml:"pci"`
	// Path is the way to the GPU on the PCI bus, as the kernel writes it below
	// /sys/devices: the host bridge, other bridges, and the GPU itself, with which it
	// takes the place of PCI.
	Path        string `yaml:"path"`
	NUMA        *int   `yaml:"numa"`
	MemoryMiB   uint64 `yaml:"memoryMiB"`
	ReservedMiB uint64 `yaml:"reservedMiB"`
	Lost        bool   `yaml:"lost"`
	// Unplugged GPUs come with Plug.
	Unplugged bool `yaml:"unplugged"`
	// ECC is off where it is false; the cards of the models have it on.
	ECC *bool `yaml:"ecc"`
	// MIG is the mode that the GPU begins in. Default off.
	MIG bool `yaml:"mig"`
	// NotSupported are calls that are answered NotSupported where they are about this
	// GPU, beside those of the model; as in Spec.
	NotSupported []string `yaml:"notSupported"`
}

// Model is what all GPUs of one product have in common. The tables under
// models/ carry the figures; see their comments for where each comes from.
type Model struct {
	Name              string `yaml:"name"`
	MemoryMiB         uint64 `yaml:"memoryMiB"`
	ReservedMiB       uint64 `yaml:"reservedMiB"`
	ContextMiB        uint64 `yaml:"contextMiB"` // of a CUDA context; default 300
	PCIDevice         uint32 `yaml:"pciDevice"`
	PCISubsystem      uint32 `yaml:"pciSubsystem"`
	ComputeCapability string `yaml:"computeCapability"`
	// SMs is the number of multiprocessors, as NVIDIA publishes it. 0: those of the largest instance.
	SMs           uint32    `yaml:"sms"`
	Architecture  uint32    `yaml:"architecture"` // NVML_DEVICE_ARCH_*
	Brand         uint32    `yaml:"brand"`        // NVML_BRAND_*
	NVLinks       int       `yaml:"nvlinks"`
	NVLinkVersion int       `yaml:"nvlinkVersion"`
	NVSwitches    int       `yaml:"nvswitches"`
	MIG           *MIGTable `yaml:"mig"`
	// NotSupported are the calls that the model's driver has no answer to; as in Spec.
	NotSupported []string `yaml:"notSupported"`
}

// MIGTable is what a model's driver says about MIG. A model without one is not
// MIG capable.
type MIGTable struct {
	// Slots is the number of memory slices that placements count in.
	Slots int `yaml:"slots"`
	// Devices is the most MIG devices that a GPU can carry.
	Devices int `yaml:"devices"`
	// ModeNeedsReset says that a mode change waits for a GPU reset (Ampere).
	ModeNeedsReset bool         `yaml:"modeNeedsReset"`
	Profiles       []MIGProfile `yaml:"profiles"`
}

// MIGProfile is one row of a model's MIG table.
type MIGProfile struct {
	Name string `yaml:"name"`
	// Enum is the NVML_GPU_INSTANCE_PROFILE_* that asks for the row, ID the
	// number that creation takes; they are not the same.
	Enum      uint32 `yaml:"enum"`
	ID        uint32 `yaml:"id"`
	Max       uint32 `yaml:"max"`
	Slices    uint32 `yaml:"slices"`
	SMs       uint32 `yaml:"sms"`
	MemoryMiB uint64 `yaml:"memoryMiB"`
	// Starts are the memory slices an instance may begin at, Size how many it
	// takes.
	Starts []uint32 `yaml:"starts"`
	Size   uint32   `yaml:"size"`
	// Engines that come with an instance.
	Copy    uint32 `yaml:"copy"`
	Decode  uint32 `yaml:"decode"`
	Encode  uint32 `yaml:"encode"`
	JPEG    uint32 `yaml:"jpeg"`
	OFA     uint32 `yaml:"ofa"`
	Display bool   `yaml:"gfx"`
}

// defaultContextMiB is about what a context takes on a large card before any
// module is loaded.
const defaultContextMiB = 300

//go:embed models/*.yaml
var modelFiles embed.FS

var errNoModel = errors.New("no such GPU model")

// Models lists the names that Spec.Model takes.
func Models() []string {
	var names []string
	files, _ := fs.Glob(modelFiles, "models/*.yaml")
	for _, f := range files {
		names = append(names, strings.TrimSuffix(path.Base(f), ".yaml"))
	}
	slices.Sort(names)
	return names
}

// LoadModel reads one of Models.
func LoadModel(name string) (*Model, error) {
	data, err := modelFiles.ReadFile("models/" + name + ".yaml")
	if err != nil {
		return nil, fmt.Errorf("%w: %q (have %s)", errNoModel, name, strings.Join(Models(), ", "))
	}
	var m Model
	if err := decodeStrict(data, &m); err != nil {
		return nil, fmt.Errorf("read model %s: %w", name, err)
	}
	return &m, nil
}

// Profiles are the MIG profiles of a model, by name, as its driver was recorded to tell
// them. The error is LoadModel's.
func Profiles(model string) (map[string]MIGProfile, error) {
	m, err := LoadModel(model)
	if err != nil {
		return nil, err
	}
	out := map[string]MIGProfile{}
	if m.MIG != nil {
		for _, p := range m.MIG.Profiles {
			out[p.Name] = p
		}
	}
	return out, nil
}

// ParseSpec reads a world's YAML. Unknown keys are refused.
func ParseSpec(data []byte) (Spec, error) {
	var s Spec
	if err := decodeStrict(data, &s); err != nil {
		return Spec{}, fmt.Errorf("parse world: %w", err)
	}
	return s, nil
}

// LoadSpec reads a world's YAML file.
func LoadSpec(file string) (Spec, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return Spec{}, fmt.Errorf("read world: %w", err)
	}
	s, err := ParseSpec(data)
	if err != nil {
		return Spec{}, fmt.Errorf("%s: %w", file, err)
	}
	return s, nil
}

func decodeStrict(data []byte, into any) error {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	dec.KnownFields(true)
	if err := dec.Decode(into); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

var driverVersion = regexp.MustCompile(`^\d+(\.\d+){1,2}$`)

func (s Spec) withDefaults() Spec {
	if s.Driver == "" {
		s.Driver = "580.159.03"
	}
	if s.CUDA == "" {
		s.CUDA = "13.0"
	}
	if s.Seed == "" {
		s.Seed = "gpu"
	}
	if s.Model == "" {
		s.Model = "H100-80GB"
	}
	if s.Count == 0 {
		s.Count = 8
	}
	if s.Minors == "" {
		s.Minors = "reversed"
	}
	return s
}

func (s Spec) validate() error {
	if s.Count < 1 || s.Count > MaxGPUs {
		return fmt.Errorf("count %d: a world has 1 to %d GPUs", s.Count, MaxGPUs)
	}
	if !driverVersion.MatchString(s.Driver) {
		return fmt.Errorf("driver %q: want a version such as 580.159.03", s.Driver)
	}
	if _, err := cudaNumber(s.CUDA); err != nil {
		return err
	}
	if !slices.Contains([]string{"reversed", "same"}, s.Minors) {
		return fmt.Errorf("minors %q: want reversed or same", s.Minors)
	}
	if !slices.Contains([]string{"", "switch", "mesh", "pairs", "cube", "none"}, s.NVLink) {
		return fmt.Errorf("nvlink %q: want switch, mesh, pairs, cube or none", s.NVLink)
	}
	if s.NVLink != "" && s.Links != nil {
		return errors.New("nvlink and links: want one of them")
	}
	if err := s.MIG.validate(); err != nil {
		return err
	}
	if err := checkCalls(s.NotSupported); err != nil {
		return err
	}
	seen := map[int]bool{}
	for _, g := range s.GPUs {
		if g.Index < 0 || g.Index >= s.Count {
			return fmt.Errorf("gpus: index %d: the world has GPUs 0 to %d", g.Index, s.Count-1)
		}
		if seen[g.Index] {
			return fmt.Errorf("gpus: index %d stands twice", g.Index)
		}
		seen[g.Index] = true
	}
	return nil
}

// checkCalls refuses patterns that name no call of NVML which the world answers: without
// it, a name that is spelt wrong would go unnoticed.
func checkCalls(patterns []string) error {
	for _, pattern := range patterns {
		known := false
		for call := range calls {
			known = known || strings.HasPrefix(call, "nvml") && matches(pattern, call)
		}
		if !known {
			return fmt.Errorf("notSupported: %q is neither the name nor a pattern of a call that is answered", pattern)
		}
	}
	return nil
}

// matches says whether a pattern of path.Match is of a call.
func matches(pattern, call string) bool {
	ok, err := path.Match(pattern, call)
	return ok && err == nil
}

// cudaNumber is a CUDA version as the driver gives it: 13.0 is 13000.
func cudaNumber(v string) (int, error) {
	major, minor, ok := strings.Cut(v, ".")
	a, err1 := strconv.Atoi(major)
	b, err2 := strconv.Atoi(minor)
	if !ok || err1 != nil || err2 != nil || a < 1 || b < 0 || b > 99 {
		return 0, fmt.Errorf("cuda %q: want a version such as 13.0", v)
	}
	return a*1000 + b*10, nil
}

// uuid derives a GPU's UUID from the seed, in the driver's own form.
func uuid(seed string, index int) string {
	h := sha256.Sum256(fmt.Appendf(nil, "%s/%d", seed, index))
	h[6] = h[6]&0x0f | 0x40
	h[8] = h[8]&0x3f | 0x80
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", h[0:4], h[4:6], h[6:8], h[8:10], h[10:16])
}

// buses are the PCI buses that GPUs stand on, after boards with 8 and 16.
var buses = [MaxGPUs]uint32{0x07, 0x0f, 0x1b, 0x2c, 0x43, 0x4e, 0x52, 0x61, 0x87, 0x90, 0x9d, 0xb7, 0xbd, 0xc3, 0xd1, 0xdf}
