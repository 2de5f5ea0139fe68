// Browsers refuse workers on file:// pages. There an invisible frame runs the search index instead, so that search
// works in a site that was opened from a folder.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inner = frame.contentWindow
      window.addEventListener("message", event => {
        if (event.source !== this.inner) return
        const message = new MessageEvent("message", { data: event.data })
        this.dispatchEvent(message)
        if (this.onmessage) this.onmessage(message)
      })
      const document_ = this.inner.document
      document_.open()
      document_.write(`<script>
        window.postMessage_ = message => parent.postMessage(message, "*")
        window.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {
          const script = document.createElement("script")
          script.src = url
          script.onload = done
          script.onerror = failed
          document.body.appendChild(script)
        })), Promise.resolve())
        window.postMessage = window.postMessage_
      <\/script><body><script src="${url}"><\/script></body>`)
      document_.close()
      this.ready = new Promise(done => frame.addEventListener("load", done, { once: true }))
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data, source: window })))
    }
    terminate() {}
  }
}
