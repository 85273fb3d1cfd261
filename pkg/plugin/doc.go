// SPDX-License-Identifier: Apache-2.0

// Package plugin serves resources through the kubelet's device-plugin API, v1beta1. It is
// the only package that knows that API.
//
// A resource is served from a [Source]. The source decides four things: the list of devices,
// which of them to prefer, what a container gets for them, and when it may start. A [Kubelet]
// watches the kubelet's directory of sockets and serves a set of resources there. Each resource
// has a [Plugin] with a socket of its own:
//
//	k := plugin.NewKubelet(plugin.KubeletOptions{Dir: dir, Logger: log})
//	go k.Run(ctx)
//	k.Set(map[string]plugin.Source{"example.com/gpu-mem": units})
//
// # Registration
//
// A kubelet that restarts forgets all plugins and removes all sockets from its directory. The
// only sign is its own socket, which it creates after that. The kubelet also relies on each
// plugin's stream of lists: when the stream ends, all its devices count as unhealthy.
//
// So a plugin checks three things whenever anything happens: the kubelet's socket, its own
// socket, and its open streams. It registers if the kubelet's socket is a new one, or if no
// stream is open. inotify wakes the plugin. It also checks every 30 seconds, since events can be
// lost, and every second if inotify fails.
//
//   - The plugin listens before it registers, since the kubelet dials back before it answers.
//   - If a starting kubelet removes the plugin's socket meanwhile, the plugin gives the
//     registration up.
//   - A starting kubelet refuses until it listens on its socket. The plugin tries again every few
//     milliseconds.
//   - Each resource registers by itself, and does not wait for another's answer.
//
// An open stream proves nothing: any process that reaches the socket can hold one open after the
// kubelet's has ended. A caller that asks the kubelet for its resources, and misses one, calls
// [Kubelet.Suspect]. The plugin then registers the resource again. If the kubelet knew it after
// all, it now has two streams. That does no harm, but the kubelet never closes the older one. So
// this happens at most once in 30 seconds.
//
// At each registration the kubelet asks whether it must call PreStartContainer. It must, unless
// the resource has no devices. Then the kubelet would refuse every container that wants the
// resource, even one that gets it through a ResourceClaim. So a resource is registered again when
// it gets its first device or loses its last. It sends no device before that.
//
// A plugin is one gRPC server for as long as it runs. It gets a new listener when the file of
// its socket is gone. Open streams stay open, since the kubelet has one client for each resource:
// the end of an old stream would make it disconnect a newer one.
//
// Two agents can overlap in a rolling update. The newer one takes the socket over. The older one
// finds that another process listens there, and leaves it alone.
//
// # Status
//
// [Kubelet.Status] returns for each resource whether the kubelet receives its newest list. If
// not, it has the time since then and the reason. A kubelet that opens a stream and ends it at
// once, again and again, does not receive the list. [KubeletOptions].Changed is called when the
// answer may have changed.
//
// # Lists
//
// A list is encoded once. It is sent to every stream at once when it changes, also while calls
// are in flight. A slow stream skips to the newest list. The package neither reorders a list
// nor adds or omits devices. So the source must first withdraw a device as unhealthy, and drop
// it only when no call can name it.
//
//   - A source that closes its channel and returns the same slice has it sent again, to every
//     open stream. The kubelet then writes its checkpoint anew.
//   - Before the source knows its devices, the resource is not registered and nothing is sent.
//     An empty list would fail the pods that wait for their former devices.
//   - The kubelet receives at most 4 MiB. A longer list is not sent, and shows in [Status].
//   - [KubeletOptions].Sent is called for each list that was sent.
//
// [Kubelet.Withhold] ends the streams while calls are still answered. An agent uses it when it is
// about to end and may have to take that back.
//
// # Calls
//
// GetPreferredAllocation names every free ID while a pod waits. So its request is decoded as one
// string. The text of a source's error gets into the pod's Events, after the resource's name. A
// wait in PreStartContainer ends a little before the kubelet stops waiting, so that the reason
// arrives. A panic in a source is logged and ends the process, since the source may be left
// half changed. Running containers do without the agent.
//
// # Limits
//
// The package does not know what a GPU is, which pod holds a device, or when a list should
// change.
package plugin
