/** Browser features that JupyterLab's packages use on import and jsdom lacks. */

class DragEventStub extends MouseEvent {}
globalThis.DragEvent ??= DragEventStub as typeof DragEvent;
document.queryCommandSupported ??= () => false;
window.matchMedia ??= (media: string) =>
  Object.assign(new EventTarget(), { media, matches: false, onchange: null }) as MediaQueryList;
