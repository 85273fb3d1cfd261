// SPDX-License-Identifier: Apache-2.0

package loopback

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"syscall"
)

// FreePorts are n ports of loopback that nobody had a moment ago. They are below those from
// which the kernel takes ports of its own choice (net.ipv4.ip_local_port_range), or another
// process's connection might have one before the program that it is for.
func FreePorts(n int) ([]int, error) {
	const lowest, end = 16384, 32768
	var ports []int
	for tries := 0; len(ports) < n; tries++ {
		port := lowest + rand.IntN(end-lowest)
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		switch {
		case errors.Is(err, syscall.EADDRINUSE) && tries < 1000:
			continue
		case err != nil:
			return nil, fmt.Errorf("find a free port: %w", err)
		}
		defer l.Close()
		ports = append(ports, port)
	}
	return ports, nil
}
