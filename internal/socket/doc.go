// SPDX-License-Identifier: Apache-2.0

// Package socket listens on Unix sockets in the kubelet's directories. The kubelet finds a plugin
// by the file of its socket:
//
//	s, err := socket.Listen(path, ".temporary")
//	…
//	defer s.Remove()
//	go server.Serve(s)
//
// Other processes write to such a directory. The kubelet removes all sockets of its device-plugin
// directory when it starts. A newer agent replaces the socket of an older one. [Socket.Standing]
// returns what has become of a socket's file, and [Keep] acts on that: it makes a new socket if
// the file is gone, and leaves the path to another process that listens there. [Inotify] reports
// when to look again.
//
// The package does not know the protocols that the sockets are for.
package socket
