// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

func (s Spec) link() string     { return fmt.Sprintf("gpunode%d", s.Slot) }
func (s Spec) linkPeer() string { return fmt.Sprintf("gpupeer%d", s.Slot) }

// makeNetwork gives the new network namespace of a node with a control plane an address
// of its own with a default route, which the API server and the kubelet look for. Both
// ends of the veth pair stay inside: the node reaches nothing and adds nothing to the
// host. The address of the Service "kubernetes" lies on the loopback, where the API
// server listens on the Service's port, so pods reach it without kube-proxy.
func makeNetwork(spec Spec) error {
	here := side{&netlink.Handle{}}
	if err := here.up("lo", serviceIP+"/32"); err != nil {
		return err
	}
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: spec.link()}, PeerName: spec.linkPeer()}
	if err := netlink.LinkAdd(veth); err != nil {
		return fmt.Errorf("add veth pair %s: %w", spec.link(), err)
	}
	if err := here.up(spec.linkPeer()); err != nil {
		return err
	}
	return here.home(spec)
}

// joinNetwork ties the new network namespace to that of the node that it joins, door, by
// a veth pair: the other node is its gateway, also to the Service "kubernetes", and knows
// the way to its pods. Both ends go with this namespace.
func joinNetwork(spec Spec, door *os.File) error {
	here := side{&netlink.Handle{}}
	if err := here.up("lo"); err != nil {
		return err
	}
	handle, err := netlink.NewHandleAt(netns.NsHandle(int(door.Fd())))
	if err != nil {
		return fmt.Errorf("enter the network of node %s: %w", spec.Join.Name, err)
	}
	defer handle.Close()
	there := side{handle}
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: spec.link()}, PeerName: spec.linkPeer(),
		PeerNamespace: netlink.NsFd(int(door.Fd()))}
	if err := netlink.LinkAdd(veth); err != nil {
		return fmt.Errorf("add veth pair %s to node %s: %w", spec.link(), spec.Join.Name, err)
	}
	if err := there.up(spec.linkPeer(), spec.gatewayIP()+"/24"); err != nil {
		return fmt.Errorf("on node %s: %w", spec.Join.Name, err)
	}
	if err := here.home(spec); err != nil {
		return err
	}
	if err := there.route(spec.linkPeer(), spec.podCIDR(), spec.nodeIP()); err != nil {
		return fmt.Errorf("on node %s: %w", spec.Join.Name, err)
	}
	return nil
}

// side is one network namespace.
type side struct{ *netlink.Handle }

// home gives the node its address, a way out, and forwarding for the pods' bridge.
func (s side) home(spec Spec) error {
	if err := s.up(spec.link(), spec.nodeIP()+"/24"); err != nil {
		return err
	}
	if err := s.route(spec.link(), "0.0.0.0/0", spec.gatewayIP()); err != nil {
		return err
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644); err != nil {
		return fmt.Errorf("turn forwarding on: %w", err)
	}
	return nil
}

// up turns a link on, with these addresses.
func (s side) up(name string, cidrs ...string) error {
	link, err := s.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find %s: %w", name, err)
	}
	for _, cidr := range cidrs {
		address, err := netlink.ParseAddr(cidr)
		if err != nil {
			return fmt.Errorf("parse address %s: %w", cidr, err)
		}
		if err := s.AddrAdd(link, address); err != nil {
			return fmt.Errorf("give %s the address %s: %w", name, cidr, err)
		}
	}
	if err := s.LinkSetUp(link); err != nil {
		return fmt.Errorf("turn %s on: %w", name, err)
	}
	return nil
}

// route has what is for cidr go by the link to gateway.
func (s side) route(name, cidr, gateway string) error {
	link, err := s.LinkByName(name)
	if err != nil {
		return fmt.Errorf("find %s: %w", name, err)
	}
	_, to, err := net.ParseCIDR(cidr)
	if err != nil {
		return err
	}
	if err := s.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: to, Gw: net.ParseIP(gateway)}); err != nil {
		return fmt.Errorf("add the route to %s by %s: %w", cidr, gateway, err)
	}
	return nil
}

// peerThere says whether the node that this one has joined still has its end of their
// link. The kernel takes it away some time after the last process of the other end.
func (s Spec) peerThere() (bool, error) {
	file, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", s.Join.Init.PID))
	if err != nil || !s.Join.Init.alive() {
		return false, nil // its network has ended with it
	}
	defer file.Close()
	handle, err := netlink.NewHandleAt(netns.NsHandle(int(file.Fd())))
	if err != nil {
		return false, fmt.Errorf("enter the network of node %s: %w", s.Join.Name, err)
	}
	defer handle.Close()
	// One link by its name: a list is interrupted by a link that comes or goes meanwhile.
	if _, err = handle.LinkByName(s.linkPeer()); errors.As(err, new(netlink.LinkNotFoundError)) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for the link %s of node %s: %w", s.linkPeer(), s.Join.Name, err)
	}
	return true, nil
}
