// SPDX-License-Identifier: Apache-2.0

// Package socket has Unix sockets that stand in a directory of the kubelet's, where the
// kubelet finds a plugin by its socket's file:
//
//	s, err := socket.Listen(path, ".temporary")
//	…
//	defer s.Remove()
//	go server.Serve(s)
//
// Others write to such a directory. The kubelet removes the sockets of its device-plugin
// directory when it starts, and a newer process of ours puts its socket in the place of
// ours. [Socket.Standing] tells what has become of a socket's file: whoever serves it
// makes a new one when it is gone, and leaves the directory to a newer process. [Inotify]
// tells when to look again.
//
// The package does not know who is called by way of a socket, or what is said.
package socket
