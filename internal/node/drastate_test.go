// SPDX-License-Identifier: Apache-2.0

package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

// account is a whole account of claims with these in its list, as the kubelet writes it.
func account(t testing.TB, list string) string {
	t.Helper()
	data := `{"kind":"DRACheckpoint","apiVersion":"checkpoint.dra.kubelet.k8s.io/v1","ClaimInfoStateList":` + list + `}`
	text, err := json.Marshal(map[string]any{"Data": data, "Checksum": crc32.ChecksumIEEE([]byte(data))})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

const twoClaims = `[
	{"ClaimUID":"u2","ClaimName":"b","Namespace":"train","PodUIDs":{"p2":{},"p1":{}},"DriverState":{"gpus.example.com":{"Devices":[
		{"PoolName":"node/a100","DeviceName":"gpu-0-shared","ShareID":"s1","RequestNames":["gpu"],"CDIDeviceIDs":["example.com/gpu=0123456789abcdef"]},
		{"PoolName":"node/a100","DeviceName":"gpu-1","ShareID":null,"RequestNames":["all"],"CDIDeviceIDs":null}]},"net.example.org":{"Devices":null}}},
	{"ClaimUID":"u1","ClaimName":"a","Namespace":"train","PodUIDs":{},"DriverState":{"gpus.example.com":{"Devices":null}}}]`

func TestDRAState(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "dra_manager_state")
	if s, err := ReadDRAState(dir); !errors.Is(err, gpu.ErrNotFound) || s.Claims != nil || s.Stamp != (Stamp{}) {
		t.Errorf("without a file: %+v, %v", s, err)
	}
	for list, want := range map[string][]PreparedClaim{
		"null": {}, "[]": {},
		twoClaims: {
			{Namespace: "train", Name: "a", UID: "u1", Devices: map[string][]PreparedDevice{"gpus.example.com": nil}},
			{Namespace: "train", Name: "b", UID: "u2", PodUIDs: []string{"p1", "p2"}, Devices: map[string][]PreparedDevice{
				"gpus.example.com": {
					{Requests: []string{"gpu"}, Pool: "node/a100", Device: "gpu-0-shared", Share: "s1", CDI: []string{"example.com/gpu=0123456789abcdef"}},
					{Requests: []string{"all"}, Pool: "node/a100", Device: "gpu-1"},
				}, "net.example.org": nil}},
		},
	} {
		replace(t, path, account(t, list))
		if s, err := ReadDRAState(dir); err != nil || !reflect.DeepEqual(s.Claims, want) || s.Stamp == (Stamp{}) {
			t.Errorf("%s\ngot  %+v, %v\nwant %+v", list, s, err, want)
		}
	}
}

// A directory that is not mounted is no word of the kubelet's: taken for one, every claim
// would look as if the kubelet had not prepared it.
func TestDRAStateThatIsNotToBeSeen(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "kubelet")
	if _, err := ReadDRAState(dir); err == nil || errors.Is(err, gpu.ErrNotFound) || !strings.Contains(err.Error(), dir) {
		t.Errorf("%v, want an error that names the directory, and not that there is no account", err)
	}
}

// What a kubelet 1.36.3 wrote for four claims in the end-to-end test.
func TestDRAStateOfTheRealKubelet(t *testing.T) {
	text, err := os.ReadFile("testdata/dra_manager_state-1.36.3")
	must(t, err)
	dir := t.TempDir()
	replace(t, filepath.Join(dir, "dra_manager_state"), string(text))
	s, err := ReadDRAState(dir)
	must(t, err)
	var got []string
	for _, c := range s.Claims {
		got = append(got, fmt.Sprintf("%s/%s %d %v", c.Namespace, c.Name, len(c.PodUIDs), c.Devices))
	}
	want := []string{
		"work/dra-a 1 map[gpus.example.com:[{[gpu] pool device  [example.com/gpu=f0aa23f75faf9160]}]]",
		"work/dra-b 1 map[gpus.example.com:[{[gpu] pool device  [example.com/gpu=2968c5bc0baeefa2]}]]",
		"work/dra-d 1 map[gpus.example.com:[{[gpu] pool device  [example.com/gpu=da0170e741bcd454]}]]",
		"work/dra-e 1 map[gpus.example.com:[{[gpu] pool device  [example.com/gpu=934414fd2ee3375e]}]]",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// Whatever is not understood may be held: no account is read in part.
func TestDRAStateThatIsNotWhole(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "dra_manager_state")
	whole := account(t, twoClaims)
	later := strings.Replace(strings.Replace(whole, "kubelet.k8s.io/v1", "kubelet.k8s.io/v2", 1), `"Checksum":`, `"Other":`, 1)
	for name, text := range map[string]string{
		"empty": "", "half": whole[:len(whole)/2], "no data": "{}", "another format": later,
		"another version": func() string {
			data := `{"kind":"DRACheckpoint","apiVersion":"checkpoint.dra.kubelet.k8s.io/v2","ClaimInfoStateList":[]}`
			return fmt.Sprintf(`{"Data":%q,"Checksum":%d}`, data, crc32.ChecksumIEEE([]byte(data)))
		}(),
		"a byte changed":        strings.Replace(whole, "train", "brain", 1),
		"no list":               strings.Replace(account(t, "[]"), "ClaimInfoStateList", "List", 1),
		"a claim without a UID": account(t, `[{"ClaimName":"a","Namespace":"train"}]`),
		"without a name":        account(t, `[{"ClaimUID":"u","Namespace":"train"}]`),
		"without a namespace":   account(t, `[{"ClaimUID":"u","ClaimName":"a"}]`),
		"a list of nothing":     account(t, `[null]`),
		"pods of another kind":  account(t, `[{"ClaimUID":"u","ClaimName":"a","Namespace":"train","PodUIDs":["p"]}]`),
	} {
		replace(t, path, text)
		if s, err := ReadDRAState(dir); !errors.Is(err, gpu.ErrInvalid) || s.Claims != nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %+v, %v, want ErrInvalid that names the file", name, s, err)
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadDRAState(dir); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("a directory: %v", err)
	}
}

func FuzzDRAState(f *testing.F) {
	f.Add(twoClaims)
	f.Add("null")
	f.Fuzz(func(t *testing.T, list string) {
		claims, err := decodeDRAState([]byte(account(t, list)))
		if err != nil {
			return
		}
		if !slices.IsSortedFunc(claims, func(a, b PreparedClaim) int { return strings.Compare(a.Namespace, b.Namespace) }) {
			t.Errorf("not sorted: %+v", claims)
		}
		for _, c := range claims {
			if c.UID == "" || c.Name == "" || c.Namespace == "" || !slices.IsSorted(c.PodUIDs) {
				t.Errorf("%+v", c)
			}
		}
	})
}
