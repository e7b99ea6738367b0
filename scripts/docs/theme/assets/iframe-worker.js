// From file://, browsers refuse workers. The search's worker then runs in a frame of the page.
class WorkerInAFrame extends EventTarget {
  constructor(url) {
    super();
    this.frame = document.createElement("iframe");
    this.frame.hidden = true;
    document.body.append(this.frame);
    this.inside = this.frame.contentWindow;
    this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    this.inside.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => this.load(each)), Promise.resolve());
    this.ready = this.load(url);
  }
  load(src) {
    return new Promise((resolve, reject) => {
      const script = this.inside.document.createElement("script");
      Object.assign(script, { src, onload: resolve, onerror: reject });
      this.inside.document.body.append(script);
    });
  }
  postMessage(data) {
    this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
  }
  terminate() {
    this.frame.remove();
  }
}
if (location.protocol === "file:") window.Worker = WorkerInAFrame;
