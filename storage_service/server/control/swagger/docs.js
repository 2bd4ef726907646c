// The status page keeps the token under the same name: entered once, it serves both.
"use strict";
const KEY = "streamhouse-token";
const byId = (id) => document.getElementById(id);
const headers = () => {
  const token = sessionStorage.getItem(KEY);
  return token ? { Authorization: `Bearer ${token}` } : {};
};

async function show() {
  const answer = await fetch("/openapi.json", { headers: headers(), cache: "no-store" });
  const needsToken = answer.status === 401;
  byId("entry").hidden = !needsToken;
  if (!answer.ok) {
    byId("refused").textContent = (await answer.json()).error.message;
    byId("entry").hidden = false;
    return;
  }
  SwaggerUIBundle({
    spec: await answer.json(),
    domNode: byId("routes"),
    presets: [SwaggerUIBundle.presets.apis],
    layout: "BaseLayout",
    deepLinking: true,
    requestInterceptor: (request) => {
      Object.assign(request.headers, headers());
      return request;
    },
  });
}

byId("entry").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, byId("token").value);
  show();
});
show();
