// SPDX-License-Identifier: Apache-2.0

// Package loopback finds ports for the programs that tests start, such as an API server, Kueue
// or Prometheus. Such a program is told its port before it runs, so the port is free when it is
// chosen and has to be free still when the program listens, which may be seconds later. Tests
// that serve by themselves need none of this: they listen on port 0.
//
//	ports, err := loopback.FreePorts(2)
//	cmd := exec.Command(program, fmt.Sprintf("--listen=127.0.0.1:%d", ports[0]))
//
// Nothing is reserved: another program that is told the same port may come first. Ports are
// drawn at random, from 16,384, so that two tests seldom draw the same.
package loopback
