// SPDX-License-Identifier: Apache-2.0

package fakes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	health "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// Below a kubelet's directory: where DRA drivers have their sockets, and its account of
// the claims that it has had prepared.
const (
	registryDir    = "plugins_registry"
	claimsFile     = "dra_manager_state"
	registrySuffix = "-reg.sock"
)

const (
	// lookEvery is how often the registry is looked at. The real kubelet watches it.
	lookEvery = 20 * time.Millisecond
	// claimsTimeout is what a driver has for a call.
	claimsTimeout = 45 * time.Second
)

// Driver is what a kubelet knows of a DRA driver at one moment.
type Driver struct {
	Client dra.DRAPluginClient // of the newest registration
	// Registrations counts them.
	Registrations int
	// Health is what the driver said last of its devices.
	Health []*health.DeviceHealth
	// Gone is why it is not connected any more.
	Gone error
}

// driver is a DRA driver's, with the connection.
type driver struct {
	Driver
	socket os.FileInfo
	conn   *grpc.ClientConn
}

// PreparedClaim is a claim in the kubelet's account.
type PreparedClaim struct {
	*dra.Claim
	// Pods are the UIDs of those that have it, sorted.
	Pods []string
	// Devices are all that the driver has answered, without a value before it has.
	Devices []*dra.Device
}

// claim is one in the account.
type claim struct {
	*dra.Claim
	pods    map[string]struct{}
	drivers map[string][]*dra.Device
	// prepared says that this process of the kubelet's has had it prepared.
	prepared bool
}

// followDrivers registers the drivers whose sockets there are, until ctx ends.
func (k *Kubelet) followDrivers(ctx context.Context) {
	defer func() {
		k.mu.Lock()
		defer k.mu.Unlock()
		for _, d := range k.drivers {
			_ = d.conn.Close()
		}
		clear(k.drivers)
		k.changedLocked()
	}()
	for {
		sockets, _ := filepath.Glob(filepath.Join(k.o.Dir, registryDir, "*"+registrySuffix)) // the pattern is a good one
		for _, path := range sockets {
			info, err := os.Stat(path)
			if err != nil {
				continue // it has gone
			}
			k.mu.Lock()
			known := slices.ContainsFunc(slices.Collect(maps.Values(k.drivers)), func(d *driver) bool {
				return os.SameFile(d.socket, info) && d.socket.ModTime().Equal(info.ModTime())
			})
			k.mu.Unlock()
			if !known {
				// One that a dead process has left refuses, and is asked again.
				_ = k.registerDriver(ctx, path, info)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(lookEvery):
		}
	}
}

func (k *Kubelet) registerDriver(ctx context.Context, path string, info os.FileInfo) error {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	conn, err := Dial(ctx, path)
	if err != nil {
		return err
	}
	client := registration.NewRegistrationClient(conn)
	said, err := client.GetInfo(ctx, &registration.InfoRequest{})
	if err == nil && (said.Type != registration.DRAPlugin || !slices.Contains(said.SupportedVersions, dra.DRAPluginService)) {
		err = fmt.Errorf("%s is a %s of %v", path, said.Type, said.SupportedVersions)
	}
	if err == nil {
		// Before the answer: the driver may write its slices then.
		k.mu.Lock()
		d := k.drivers[said.Name]
		if d == nil {
			d = &driver{}
			k.drivers[said.Name] = d
		} else {
			_ = d.conn.Close()
		}
		*d = driver{Driver{Client: dra.NewDRAPluginClient(conn), Registrations: d.Registrations + 1}, info, conn}
		k.changedLocked()
		k.serving.Go(func() { k.followHealth(said.Name, conn) })
		k.mu.Unlock()
		_, err = client.NotifyRegistrationStatus(ctx, &registration.RegistrationStatus{PluginRegistered: true})
		return err
	}
	_ = conn.Close()
	return err
}

// followHealth takes what the driver says of its devices until the stream ends, which is
// when its process does.
func (k *Kubelet) followHealth(name string, conn *grpc.ClientConn) {
	stream, err := health.NewDRAResourceHealthClient(conn).NodeWatchResources(context.Background(), &health.NodeWatchResourcesRequest{})
	for err == nil {
		var said *health.NodeWatchResourcesResponse
		if said, err = stream.Recv(); err == nil {
			k.mu.Lock()
			if d := k.drivers[name]; d != nil && d.conn == conn {
				d.Health = said.Devices
				k.changedLocked()
			}
			k.mu.Unlock()
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if d := k.drivers[name]; d != nil && d.conn == conn {
		d.Gone = err
		k.changedLocked()
	}
}

// AwaitDriver waits until a driver is registered and connected.
func (k *Kubelet) AwaitDriver(ctx context.Context, name string) (Driver, error) {
	for {
		k.mu.Lock()
		changed := k.changed
		var now Driver
		if d := k.drivers[name]; d != nil {
			now = d.Driver
		}
		k.mu.Unlock()
		if now.Client != nil && now.Gone == nil {
			return now, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return now, fmt.Errorf("%w: DRA driver %s is not registered", errors.Join(ErrRefused, ctx.Err()), name)
		}
	}
}

// Prepare is what a kubelet does with a pod's claims before it makes the pod's sandbox. A
// claim that it has had prepared already causes no call. Each is in the account before the
// call, also where that fails.
func (k *Kubelet) Prepare(ctx context.Context, p Pod, name string, claims ...*dra.Claim) (map[string][]*dra.Device, error) {
	k.mu.Lock()
	var ask []*dra.Claim
	asked := map[string]*claim{}
	for _, c := range claims {
		known := k.claims[c.Uid]
		if known == nil {
			known = &claim{Claim: c, pods: map[string]struct{}{}, drivers: map[string][]*dra.Device{name: nil}}
			k.claims[c.Uid] = known
		}
		known.pods[p.UID] = struct{}{}
		if asked[c.Uid] = known; !known.prepared {
			ask = append(ask, c)
		}
	}
	err := k.writeClaimsLocked()
	d := k.drivers[name]
	if err == nil && (d == nil || d.Gone != nil) {
		err = fmt.Errorf("%w: DRA driver %s is not registered", ErrRefused, name)
	}
	var client dra.DRAPluginClient
	if err == nil {
		client = d.Client
	}
	k.mu.Unlock()
	if err != nil {
		return nil, err
	}
	answer := &dra.NodePrepareResourcesResponse{}
	if len(ask) > 0 {
		ctx, cancel := context.WithTimeout(ctx, claimsTimeout)
		defer cancel()
		if answer, err = client.NodePrepareResources(ctx, &dra.NodePrepareResourcesRequest{Claims: ask}); err != nil {
			return nil, err
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	out := map[string][]*dra.Device{}
	for _, c := range claims {
		known := k.claims[c.Uid]
		if known != asked[c.Uid] {
			return nil, fmt.Errorf("%w: the kubelet has ended meanwhile", ErrRefused)
		}
		if !known.prepared {
			a := answer.Claims[c.Uid]
			if a == nil || a.Error != "" {
				return nil, fmt.Errorf("NodePrepareResources failed for ResourceClaim %s: %s", c.Name, a.GetError())
			}
			// What it remembers of an earlier process stays in front.
			known.drivers[name], known.prepared = append(known.drivers[name], a.Devices...), true
		}
		out[c.Uid] = slices.Clone(known.drivers[name])
	}
	return out, k.writeClaimsLocked()
}

// Unprepare is what a kubelet does with a pod's claims when the pod has ended. A claim that
// another pod has yet causes no call, and so does one that is not in the account.
func (k *Kubelet) Unprepare(ctx context.Context, p Pod, name string, claims ...*dra.Claim) error {
	k.mu.Lock()
	var ask []*dra.Claim
	for _, c := range claims {
		if known := k.claims[c.Uid]; known != nil {
			if delete(known.pods, p.UID); len(known.pods) == 0 {
				ask = append(ask, c)
			}
		}
	}
	err := k.writeClaimsLocked()
	d := k.drivers[name]
	if err == nil && len(ask) > 0 && (d == nil || d.Gone != nil) {
		err = fmt.Errorf("%w: DRA driver %s is not registered", ErrRefused, name)
	}
	if err != nil || len(ask) == 0 {
		k.mu.Unlock()
		return err
	}
	client := d.Client
	k.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, claimsTimeout)
	defer cancel()
	answer, err := client.NodeUnprepareResources(ctx, &dra.NodeUnprepareResourcesRequest{Claims: ask})
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range ask {
		if a := answer.Claims[c.Uid]; a == nil || a.Error != "" {
			return fmt.Errorf("NodeUnprepareResources failed for ResourceClaim %s: %s", c.Name, a.GetError())
		}
		delete(k.claims, c.Uid)
	}
	return k.writeClaimsLocked()
}

// Claims is the account of claims of one driver, sorted by namespace and name.
func (k *Kubelet) Claims(driver string) (out []PreparedClaim) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, c := range k.claims {
		if devices, has := c.drivers[driver]; has {
			out = append(out, PreparedClaim{c.Claim, slices.Sorted(maps.Keys(c.pods)), slices.Clone(devices)})
		}
	}
	slices.SortFunc(out, func(a, b PreparedClaim) int {
		return strings.Compare(a.Namespace+"/"+a.Name+"/"+a.Uid, b.Namespace+"/"+b.Name+"/"+b.Uid)
	})
	return out
}

// LoseClaims removes the account of a kubelet that does not run.
func (k *Kubelet) LoseClaims() error { return os.Remove(filepath.Join(k.o.Dir, claimsFile)) }

// What kubelet 1.36.3 writes (pkg/kubelet/cm/dra/state).
type (
	claimsDevice struct {
		PoolName, DeviceName string
		ShareID              *string
		RequestNames         []string
		CDIDeviceIDs         []string
	}
	claimsDriver struct{ Devices []claimsDevice }
	claimsEntry  struct {
		ClaimUID, ClaimName, Namespace string
		PodUIDs                        map[string]struct{}
		DriverState                    map[string]claimsDriver
	}
	claimsData struct {
		Kind               string `json:"kind"`
		APIVersion         string `json:"apiVersion"`
		ClaimInfoStateList []claimsEntry
	}
	claimsAccount struct {
		Data     string
		Checksum uint32
	}
)

func (k *Kubelet) writeClaimsLocked() error {
	data := claimsData{Kind: "DRACheckpoint", APIVersion: "checkpoint.dra.kubelet.k8s.io/v1"}
	for _, uid := range slices.Sorted(maps.Keys(k.claims)) {
		c := k.claims[uid]
		e := claimsEntry{c.Uid, c.Name, c.Namespace, c.pods, map[string]claimsDriver{}}
		for name, devices := range c.drivers {
			var all []claimsDevice
			for _, d := range devices {
				all = append(all, claimsDevice{d.PoolName, d.DeviceName, d.ShareId, d.RequestNames, d.CdiDeviceIds})
			}
			e.DriverState[name] = claimsDriver{all}
		}
		data.ClaimInfoStateList = append(data.ClaimInfoStateList, e)
	}
	text, err := json.Marshal(&data)
	if err == nil {
		text, err = json.Marshal(claimsAccount{string(text), crc32.ChecksumIEEE(text)})
	}
	path := filepath.Join(k.o.Dir, claimsFile)
	if err == nil {
		err = os.WriteFile(path+".new", text, 0o600)
	}
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		return fmt.Errorf("write the kubelet's account of claims: %w", err)
	}
	k.changedLocked()
	return nil
}

// readClaims is what a kubelet that starts knows of claims: none is prepared yet.
func (k *Kubelet) readClaims() error {
	var account claimsAccount
	var data claimsData
	text, err := os.ReadFile(filepath.Join(k.o.Dir, claimsFile))
	if err == nil {
		if err = json.Unmarshal(text, &account); err == nil {
			err = json.Unmarshal([]byte(account.Data), &data)
		}
	} else if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err != nil {
		return fmt.Errorf("read the kubelet's account of claims: %w", err)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.claims = map[string]*claim{}
	for _, e := range data.ClaimInfoStateList {
		c := &claim{Claim: &dra.Claim{Namespace: e.Namespace, Name: e.ClaimName, Uid: e.ClaimUID}, pods: e.PodUIDs, drivers: map[string][]*dra.Device{}}
		for name, state := range e.DriverState {
			c.drivers[name] = nil
			for _, d := range state.Devices {
				c.drivers[name] = append(c.drivers[name], &dra.Device{PoolName: d.PoolName, DeviceName: d.DeviceName, ShareId: d.ShareID, RequestNames: d.RequestNames, CdiDeviceIds: d.CDIDeviceIDs})
			}
		}
		k.claims[e.ClaimUID] = c
	}
	return k.writeClaimsLocked()
}
