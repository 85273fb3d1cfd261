// SPDX-License-Identifier: Apache-2.0

package node

import (
	"testing"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The generated packages' word for what end.go says by itself.
func TestEndNames(t *testing.T) {
	for got, want := range map[string]string{
		methodVersion: cri.RuntimeService_Version_FullMethodName,
		methodStop:    cri.RuntimeService_StopContainer_FullMethodName,
		methodKill:    "/" + tasks.Tasks_ServiceDesc.ServiceName + "/" + tasks.Tasks_ServiceDesc.Methods[killMethod(t)].MethodName,
	} {
		if got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

func killMethod(t *testing.T) int {
	t.Helper()
	for i, m := range tasks.Tasks_ServiceDesc.Methods {
		if m.MethodName == "Kill" {
			return i
		}
	}
	t.Fatal("containerd's tasks service has no Kill")
	return 0
}

// TestKillRequest reads what End sends as containerd does.
func TestKillRequest(t *testing.T) {
	s := &endServer{name: "containerd"}
	if _, err := s.serve(t).End(t.Context(), Owner{ID: offender}); err != nil {
		t.Fatal(err)
	}
	want := &tasks.KillRequest{ContainerID: offender, Signal: 9, All: true}
	var got tasks.KillRequest
	if err := proto.Unmarshal(s.kills[0], &got); err != nil || !proto.Equal(&got, want) {
		t.Errorf("%v, %v, want %v", &got, err, want)
	}
}
