// SPDX-License-Identifier: Apache-2.0

package gpu

// Setup is how a GPU is set beside its MIG mode: modes and limits that outlive the program that
// set them. The zero value of a field means that the driver does not report it.
type Setup struct {
	// Compute limits the number of processes that may compute on the GPU. It is empty while the GPU is in MIG
	// mode.
	Compute ComputeMode
	// Persistence is true if the driver keeps the GPU initialised while no process has it open.
	Persistence *bool
	// Accounting is true if the driver keeps figures of processes that have ended.
	Accounting *bool
	// ECC is true if the memory corrects errors, ECCPending if it will after the next reset or
	// reboot, and ECCDefault if it does on a new card of this model. All are nil for a card without
	// ECC.
	ECC, ECCPending, ECCDefault *bool
	// Power is the limit of the card's power in milliwatts.
	Power Setting
	// Clock is the clock of the multiprocessors that applications get, in MHz.
	Clock Setting
	// ClockHeld is true if the GPU computes below its default clock at this moment, because of a
	// clock that a program has set. An idle GPU never reports it.
	ClockHeld bool
	// Fabric is how far the GPU has joined its NVLink fabric; empty if it has none.
	Fabric FabricState
	// Recovery is as in Health.
	Recovery Recovery
	// Processes are those that the driver lists on the GPU, by PID, each once.
	Processes []Client
	// Limits are the driver's memory limits of cgroups that belong to no container, by cgroup. The
	// driver does not list them: the caller that knows the cgroups adds them.
	Limits []CgroupLimit
}

// CgroupLimit is the driver's memory limit of a cgroup, by its path below the hierarchy's root.
type CgroupLimit struct {
	Cgroup string
	Limit  MemoryLimit
	// Pods is true if pods are in the cgroup.
	Pods bool
}

// Setting is a setting that can be changed, with the value that it has after the driver was loaded.
// The zero value is not known.
type Setting struct{ Now, Default uint32 }

// Lowered reports whether the setting is known to be below its default.
func (s Setting) Lowered() bool { return s.Now > 0 && s.Now < s.Default }

// Client is a process that uses a GPU, or has its device node open.
type Client struct {
	// PID is in the agent's own PID namespace.
	PID int
	// Name is the process's own name for itself, at most 15 bytes; empty if it cannot be read. Any
	// process can choose its name, so it is for people.
	Name string
}

// Surroundings are what the kernel shows of a node that concerns its GPUs.
type Surroundings struct {
	// Modeset is true if the kernel's display driver (nvidia_drm) holds the GPUs.
	Modeset bool
	// MPS are the control daemons and servers of MPS, by PID: processes that call themselves so.
	MPS []Client
	// MPSDirs are the directories with sockets on which a control daemon of MPS listens
	// (CUDA_MPS_PIPE_DIRECTORY), sorted. They are those of the host's own network namespace.
	MPSDirs []string
}

// ComputeMode limits the number of processes that may compute on a GPU. A value that this version does not
// know is the driver's own number in words.
type ComputeMode string

// The driver's compute modes. ComputeUnknown is the zero value.
const (
	ComputeUnknown          ComputeMode = ""
	ComputeDefault          ComputeMode = "DEFAULT"
	ComputeExclusiveThread  ComputeMode = "EXCLUSIVE_THREAD" // of old drivers
	ComputeProhibited       ComputeMode = "PROHIBITED"
	ComputeExclusiveProcess ComputeMode = "EXCLUSIVE_PROCESS"
)

// FabricState is how far a GPU has joined its NVLink fabric. CUDA cannot begin before it is
// FabricCompleted. A failure is the driver's own text.
type FabricState string

// The driver's states. FabricNone is the zero value.
const (
	FabricNone       FabricState = ""
	FabricNotStarted FabricState = "not started"
	FabricInProgress FabricState = "in progress"
	FabricCompleted  FabricState = "completed"
)
