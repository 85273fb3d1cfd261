// SPDX-License-Identifier: Apache-2.0

package timeslice

import "testing"

func TestParseIDRefuses(t *testing.T) {
	for _, id := range []string{
		"", "::", "GPU-a", "GPU-a::", "::1", "GPU-::1", "gpu-a::1", "MIG-a::1", "GPU-a:1", "GPU-a::-1", "GPU-a::+1", "GPU-a::01",
		"GPU-a::00", "GPU-a::1 ", "GPU-a::x", "GPU-a::1::2", "GPU-a::60000", "GPU-a::4294967296", "GPU-a::18446744073709551617",
		"GPU-a::000000000000000000000000000001", "GPU-a b::1", "GPU-a\x00::1", "GPU-ä::1", "GPU-a::1g.10gb@0", "GPU-a:::1", "7",
	} {
		if uuid, n, err := ParseID(id); err == nil {
			t.Errorf("ParseID(%q) = %q, %d: want it refused", id, uuid, n)
		}
	}
}

func FuzzParseID(f *testing.F) {
	for _, id := range []string{
		"GPU-5a2f0c11-9a3e-4f57-8d57-2f7d5b1c9e01::0", "GPU-5a2f0c11-9a3e-4f57-8d57-2f7d5b1c9e01::59999", "GPU-a::10", "GPU-a::01", "GPU-a::1::1",
	} {
		f.Add(id)
	}
	f.Fuzz(func(t *testing.T, id string) {
		uuid, n, err := ParseID(id)
		if err != nil {
			return
		}
		if printed := ID(uuid, n); printed != id {
			t.Errorf("ParseID(%q) = %q, %d, which prints as %q", id, uuid, n, printed)
		}
		if n < 0 || n >= MaxListed {
			t.Errorf("ParseID(%q): number %d", id, n)
		}
	})
}
