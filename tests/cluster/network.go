// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"net"
	"os"

	"github.com/vishvananda/netlink"
)

func (s Spec) link() string     { return fmt.Sprintf("gpunode%d", s.Slot) }
func (s Spec) linkPeer() string { return fmt.Sprintf("gpupeer%d", s.Slot) }

// makeNetwork gives the new network namespace a loopback, an address of its
// own with a default route, which the API server and the kubelet look for, and
// forwarding for the pods' bridge. Both ends of the veth pair stay inside: the
// node reaches nothing and adds nothing to the host. The address of the
// Service "kubernetes" lies on the loopback, where the API server listens on
// the Service's port, so pods reach it without kube-proxy.
func makeNetwork(spec Spec) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	if err := addAddress(lo, serviceIP+"/32"); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("turn lo on: %w", err)
	}
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: spec.link()}, PeerName: spec.linkPeer()}
	if err := netlink.LinkAdd(veth); err != nil {
		return fmt.Errorf("add veth pair %s: %w", spec.link(), err)
	}
	for _, name := range []string{spec.link(), spec.linkPeer()} {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return fmt.Errorf("find %s: %w", name, err)
		}
		if err := netlink.LinkSetUp(link); err != nil {
			return fmt.Errorf("turn %s on: %w", name, err)
		}
		if name == spec.link() {
			if err := addAddress(link, spec.nodeIP()+"/24"); err != nil {
				return err
			}
			route := &netlink.Route{LinkIndex: link.Attrs().Index, Gw: net.ParseIP(spec.gatewayIP())}
			if err := netlink.RouteAdd(route); err != nil {
				return fmt.Errorf("add the default route: %w", err)
			}
		}
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644); err != nil {
		return fmt.Errorf("turn forwarding on: %w", err)
	}
	return nil
}

func addAddress(link netlink.Link, cidr string) error {
	address, err := netlink.ParseAddr(cidr)
	if err != nil {
		return fmt.Errorf("parse address %s: %w", cidr, err)
	}
	if err := netlink.AddrAdd(link, address); err != nil {
		return fmt.Errorf("give %s the address %s: %w", link.Attrs().Name, cidr, err)
	}
	return nil
}
