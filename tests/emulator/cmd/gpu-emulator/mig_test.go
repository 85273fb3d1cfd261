// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"testing"
)

// says runs nvidia-smi, which has to end with a status and print some texts.
func (n *node) says(status int, args string, texts ...string) {
	n.t.Helper()
	out, code := n.smi(strings.Fields(args)...)
	if code != status {
		n.t.Errorf("nvidia-smi %s ends with %d, want %d:\n%s", args, code, status, out)
	}
	for _, text := range texts {
		if !strings.Contains(out, text) {
			n.t.Errorf("nvidia-smi %s does not say %q:\n%s", args, text, out)
		}
	}
}

func (n *node) control(args string) error {
	n.t.Helper()
	_, err := n.run(append(strings.Fields(args), "--socket", n.socket)...)
	return err
}

func TestMIGByTheDriversTool(t *testing.T) {
	n := start(t, "model: A100-SXM4-80GB\ncount: 2")
	g := n.state().GPUs[1]
	other := n.state().GPUs[0].PCI

	n.says(6, "mig -lgi", "No GPU instances found: Not Found")
	n.says(0, "-i 1 -mig 1", "Warning: MIG mode is in pending enable state for GPU "+g.PCI+":")
	n.says(0, "-L", "GPU 1: NVIDIA A100-SXM4-80GB (UUID: "+g.UUID+")")
	if m := n.state().GPUs[1].MIG; m.Enabled || !m.Pending {
		t.Errorf("before the reset MIG is %+v", *m)
	}
	// A reset waits for whoever has the GPU, and no other GPU is in its way.
	pid := strings.TrimSpace(n.ok("proc", "start", "--gpu", "1", "--memory", "5", "--socket", n.socket))
	n.says(255, "--gpu-reset -i 1", "The following GPUs could not be reset:\n  GPU "+g.PCI+": In use by another client\n",
		"1 device is currently being used by one or more other processes")
	n.says(255, "-r -i "+strings.ToLower(other)+","+g.UUID, "GPU "+other+" was successfully reset.", "1 device is")
	n.ok("proc", "stop", pid, "--socket", n.socket)
	n.says(0, "--gpu-reset -i "+g.UUID, "GPU "+g.PCI+" was successfully reset.\nAll done.\n")
	if st := n.state(); !st.GPUs[1].MIG.Enabled || st.GPUs[0].MIG.Enabled {
		t.Errorf("after the reset MIG is %+v and %+v", *st.GPUs[0].MIG, *st.GPUs[1].MIG)
	}

	n.says(0, "mig -i 1 -lgip",
		"|   1  MIG 1g.10gb        19      7/7        9.50      No    14     0     0   |\n|                                                             1     0     0   |\n",
		"|   1  MIG 7g.80gb         0      1/1       78.75      No    98     5     0   |")
	n.says(0, "mig -i 1 -cgi 9:4,1g.10gb -C", "Successfully created GPU instance ID", "using profile MIG 3g.40gb (ID  9)", "Successfully created compute instance ID  0")
	n.says(23, "mig -i 1 -cgi 0 -C", "Unable to create a GPU instance on GPU  1 using profile 0: Insufficient Resources\nFailed to create GPU instances: Insufficient Resources")
	n.says(6, "mig -i 1 -cgi 77", "using profile 77: Not Found")
	n.says(0, "mig -i 1 -lgip", "|   1  MIG 1g.10gb        19      3/7 ")

	at := map[string]string{}
	device := map[string]string{}
	for _, gi := range n.state().GPUs[1].MIG.Instances {
		at[gi.Profile] = fmt.Sprint(gi.ID)
		device[gi.Profile] = fmt.Sprintf("  MIG %-11s Device %2d: (UUID: %s)\n", gi.Profile, gi.Compute[0].Index, gi.Compute[0].UUID)
		n.says(0, "mig -lgi", fmt.Sprintf("|   1  MIG %-14s %5s %8d  %9s     |\n", gi.Profile, map[string]string{"3g.40gb": "9", "1g.10gb": "19"}[gi.Profile], gi.ID,
			fmt.Sprintf("%d:%d", gi.Start, gi.Size)))
		n.says(0, "mig -lci", fmt.Sprintf("|   1 %6d       MIG %-14s ", gi.ID, gi.Profile))
	}
	n.says(0, "-L", device["3g.40gb"], device["1g.10gb"])
	for _, list := range []string{"-lgi", "-lci", "-lgip"} {
		out, _ := n.smi("mig", list)
		lines := strings.Split(strings.TrimSpace(out), "\n")
		for _, line := range lines {
			if len(line) != len(lines[0]) {
				t.Errorf("mig %s: the table has a crooked line:\n%s", list, out)
				break
			}
		}
	}

	// What a process is on stays.
	pid = strings.TrimSpace(n.ok("proc", "start", "--gpu", strings.TrimSuffix(strings.Split(device["3g.40gb"], "UUID: ")[1], ")\n"), "--memory", "5", "--socket", n.socket))
	n.says(19, "mig -i 1 -dci -gi "+at["3g.40gb"], "Failed to destroy compute instances: In use by another client")
	n.says(19, "mig -i 1 -dgi -gi "+at["1g.10gb"], "Failed to destroy GPU instances: In use by another client") // its compute instance stands
	n.says(0, "mig -dci -gi "+at["1g.10gb"], "Successfully destroyed compute instance ID  0 from GPU  1 GPU instance ID "+fmt.Sprintf("%2s", at["1g.10gb"]))
	n.says(0, "mig -dgi -gi "+at["1g.10gb"], "Successfully destroyed GPU instance ID "+fmt.Sprintf("%2s", at["1g.10gb"])+" from GPU  1")
	n.says(6, "mig -dgi -gi 13", "No GPU instances found")
	n.ok("proc", "stop", pid, "--socket", n.socket)

	for _, args := range []string{"mig", "mig -lgi -lci", "-mig 2", "mig -cgi", "--gpu-reset -L", "mig -i 1 -C"} {
		n.says(2, args)
	}
}

func TestMIGByTheOperator(t *testing.T) {
	n := start(t, "model: H100-80GB\ncount: 2")
	for args, refused := range map[string]bool{
		"mig on":                     true,
		"mig --gpu 0 maybe":          true,
		"mig --gpu 2 on":             true,
		"mig-create --gpu 0":         true, // MIG is off
		"fail --call x --code 3 --x": true,
	} {
		if err := n.control(args); (err != nil) != refused {
			t.Errorf("%s: %v", args, err)
		}
	}
	for _, step := range []struct {
		args    string
		refused bool
		stands  string
	}{
		{"mig --gpu 0 on", false, ""},
		{"mig-create --gpu 0 --profile 3g.40gb --start 4", false, "3g.40gb@4:1"},
		{"mig-create --gpu 0 --profile 1g.10gb --start 4", true, "3g.40gb@4:1"},
		{"mig-create --gpu 0 --profile 1g.10gb --start 2 --empty", false, "1g.10gb@2:0 3g.40gb@4:1"},
		{"mig --gpu 0 off", true, "1g.10gb@2:0 3g.40gb@4:1"},
		{"mig-destroy --gpu 0 --start 4", false, "1g.10gb@2:0"},
		{"mig-destroy --gpu 0 --start 4", true, "1g.10gb@2:0"},
		{"reboot", false, ""},
		{"mig-create --gpu 0 --profile 3g.40gb --start 4", true, ""}, // the mode does not outlive it on this card
	} {
		if err := n.control(step.args); (err != nil) != step.refused {
			t.Errorf("%s: %v", step.args, err)
		}
		stands := map[int]string{}
		for _, gi := range n.state().GPUs[0].MIG.Instances {
			stands[gi.Start] = fmt.Sprintf("%s@%d:%d", gi.Profile, gi.Start, len(gi.Compute))
		}
		var list []string
		for start := range 8 {
			if s, ok := stands[start]; ok {
				list = append(list, s)
			}
		}
		if got := strings.Join(list, " "); got != step.stands {
			t.Errorf("after %s: %q, want %q", step.args, got, step.stands)
		}
	}
}

func TestFaultsOfMIGByTheOperator(t *testing.T) {
	n := start(t, "model: A100-SXM4-80GB\ncount: 1\ngpus: [{index: 0, mig: true}]")
	if err := n.control("fail --call nvmlDeviceCreateGpuInstance* --code 999 --late --skip 1 --count 1"); err != nil {
		t.Fatal(err)
	}
	if f := n.state().Faults; len(f) != 1 || !f[0].Late || f[0].Skip != 1 {
		t.Errorf("faults: %+v", f)
	}
	n.says(0, "mig -cgi 9")
	n.says(231, "mig -cgi 9", "Unknown Error") // 999, as an exit status
	if n := len(n.state().GPUs[0].MIG.Instances); n != 2 {
		t.Errorf("%d instances stand after a creation that failed late, want 2", n)
	}
	if err := n.control("mig-destroy --gpu 0 --start 0"); err != nil {
		t.Fatal(err)
	}
	if err := n.control("mig-create --gpu 0 --profile 3g.40gb --start 0"); err != nil {
		t.Fatal(err)
	}
	for _, gi := range n.state().GPUs[0].MIG.Instances {
		for _, ci := range gi.Compute {
			if err := n.control("xid --gpu " + ci.UUID + " 94"); err != nil {
				t.Error(err)
			}
		}
	}
	if err := n.control("xid --gpu MIG-0 94"); err == nil {
		t.Error("an Xid on a MIG device that is none is not refused")
	}
}
