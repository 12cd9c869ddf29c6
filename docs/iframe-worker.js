// The search runs in a worker, and browsers start none for a page that is opened from a folder: a frame runs its script there.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.ready = new Promise(resolve => {
        addEventListener("DOMContentLoaded", () => document.body.append(frame))
        if (document.body) document.body.append(frame)
        frame.addEventListener("load", () => {
          const self = frame.contentWindow, script = self.document.createElement("script")
          self.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          script.src = url
          script.addEventListener("load", () => resolve(self))
          self.document.head.append(script)
        }, { once: true })
      })
    }

    postMessage(data) {
      this.ready.then(self => self.dispatchEvent(new self.MessageEvent("message", { data })))
    }

    terminate() {}
  }
}
