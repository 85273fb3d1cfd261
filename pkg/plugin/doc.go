// SPDX-License-Identifier: Apache-2.0

// Package plugin serves resources through the kubelet's device-plugin API, v1beta1. It is
// the only package that knows that API.
//
// A resource is served from a [Source], which reads an offer that another
// package makes: the list of devices, which of them to prefer, what a container gets for
// them, and when it may start. A [Kubelet] is the kubelet's directory of
// sockets, watched once, and the set of resources that is served there, each by
// a [Plugin] with a socket of its own:
//
//	k := plugin.NewKubelet(plugin.KubeletOptions{Dir: dir, Logger: log})
//	go k.Run(ctx)
//	k.Set(map[string]plugin.Source{"example.com/gpu-mem": units})
//
// # Registration
//
// A kubelet that restarts knows no plugin any more; it even removes all sockets from its
// directory. The only sign is its own socket, which it creates after that. And it
// relies on the stream of lists alone: when that ends, all devices count as unhealthy. So a plugin checks three things,
// the kubelet's socket, its own socket and its open streams, whenever anything
// happens, and registers when the kubelet's socket is another one than last
// time or no stream is open. It listens before it registers, since the kubelet
// dials back before it answers, and gives up a registration when a starting
// kubelet removes its socket meanwhile. inotify wakes it; it also checks slowly, for
// lost events, and often where inotify is exhausted. Each resource registers by itself, so
// that none waits for another's answer; between the creation of its socket and its
// listening the kubelet refuses, and is tried again every few milliseconds.
//
// An open stream proves nothing: any process that reaches the socket can hold one open
// while the kubelet's is gone. Only the kubelet can tell what it knows. A caller that
// asks it, and finds a resource missing, calls [Kubelet.Suspect], and the resource is
// registered again. A kubelet that knew it all along then has two
// streams, which does no harm, but the older one is never closed; so this
// happens at most once in 30 seconds.
//
// The kubelet asks once for each registration whether it has to call before it starts a
// container. It has to, but for a resource without devices: there the kubelet would refuse
// every container that wants the resource, also one that has a device of that name by a
// ResourceClaim. So a resource that loses its last device, or gets its first, is
// registered again, and no device is sent before that.
//
// [Kubelet.Status] says how each resource fares: whether the kubelet receives its
// newest list, since when it does not, and why. A kubelet that opens a stream and
// ends it at once, again and again, does not receive it; [KubeletOptions] has a
// function that is called when the answer may be another one.
//
// A plugin is one gRPC server for as long as it runs, with a new listener
// whenever its socket's file is gone. The streams that are open stay open: the
// kubelet keeps one client a resource, and the end of an old stream makes it
// disconnect a newer one.
//
// Two agents can overlap in a rolling update. The newer one takes the socket
// over, and the older one, seeing that somebody listens there, leaves it alone.
//
// # Lists
//
// A list is encoded once, by hand, and sent as those bytes to every stream, at
// once when it changes, also while calls are in flight; a stream that is slow
// skips to the last one. The order is that of the source's lists, and nothing is
// added to them or left out: that a device is withdrawn as unhealthy first, and
// leaves the list only when no call can name it, is up to the source. A source
// that closes its channel and returns the same slice has it sent again, to every
// open stream, which makes the kubelet write its checkpoint anew. Nothing is
// sent, and nothing registered, before the source knows its devices: an empty
// list would fail the pods that wait for the old ones. A list that the kubelet
// could not receive (4 MiB) is not sent and shows in [Status]. [KubeletOptions].Sent is
// told of each list that was sent, for those who count what can be had.
//
// [Kubelet.Withhold] ends the streams while calls are still answered, for an agent that is
// about to end and may have to take that back.
//
// # Calls
//
// GetPreferredAllocation comes with every free ID while a pod waits, so its
// request is decoded as one string. The text of a source's error reaches the
// pod's events behind the resource's name. A wait in PreStartContainer ends a
// little before the kubelet stops waiting, so that the reason arrives. A panic
// in a source is logged and not recovered: a half-done state must not
// be served; running containers do without the agent.
//
// The package does not know what a GPU is, who holds a device, or when a list
// should change.
package plugin
